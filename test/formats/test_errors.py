"""Relative mean squared errors of block formats on a million values: published ones, within 1.5 %."""

import pytest
import torch

from aoquant import get_format
from aoquant.formats import tiles

MILLION = (1024, 1024)
SAMPLES = {
    "normal": lambda: torch.randn(*MILLION),
    "laplace": lambda: torch.distributions.Laplace(0.0, 1.0).sample(MILLION),
    "student5": lambda: torch.distributions.StudentT(5.0).sample(MILLION),
}
# in thousandths
BARS = {
    "mxfp4": (13.3, 17.5, 17.6),
    "mxfp4-floor": (13.2, 16.0, 15.9),
    "mxfp4-ceil": (20.8,),
    "mxfp4-even": (12.5,),
    "xx-mxfp4": (13.9,),
    "qutlass-mxfp4": (13.9,),
    "mxfp4-quest": (26.9,),
    "nvfp4": (9.04, 8.59, 8.52),
    "nvfp4-search": (6.60, 6.80, 6.75),
    "xx-nvfp4": (9.04, 8.59, 8.52),
    "xx-nvfp4-static:0.1": (9.04, 8.59, 8.52),
    "qutlass-nvfp4": (9.04, 8.59, 8.52),
    "te-nvfp4": (9.04, 8.59, 8.52),
    "te-nvfp4-16x16": (12.40,),
    "fouroversix": (7.57, 7.60, 7.52),
    "fouroversix-16x16": (12.39,),
    "gridflip": (6.65, 6.67, 6.60),
    "gridflip-sided": (6.27, 6.27, 6.21),
    "gridflip-search": (5.75, 5.86, 5.82),
    "gridflip-alternating": (6.65, 6.67, 6.60),
    "gridflip-16x16": (11.83,),
    "gridflip-c0.1": (6.85,),
    "gridflip-c0.15": (6.71,),
    "gridflip-c0.2": (6.65,),
    "gridflip-c0.3": (6.68,),
    "gridflip-c0.4": (6.78,),
    "gridflip-c0.5": (6.87,),
}


@pytest.mark.parametrize("name", BARS)
def test_relative_mean_squared_errors(name: str) -> None:
    fmt = get_format(name)
    for kind, bar in zip(SAMPLES, BARS[name], strict=False):
        torch.manual_seed(1)
        x = SAMPLES[kind]().bfloat16()
        e = tiles.encode(fmt, x)
        error = tiles.decode(fmt, e, torch.float32) - x.float()
        assert 1e3 * error.double().square().sum() / x.double().square().sum() == pytest.approx(bar, rel=0.015), kind
        if name == "gridflip" and kind == "normal":
            assert e.scale is not None
            assert 0.37 <= (e.scale.view(torch.uint8) > 127).float().mean().item() <= 0.42
