"""Layers under another default dtype or device: prepared equals converted, and both are what float32 on a CPU as the
default gives, to the byte.

A model says its dtype and device; `torch.set_default_dtype` and `torch.set_default_device`, which model loaders set for
a while, are no part of them.
"""

from collections.abc import Iterator

import pytest
import torch
from support.training_cases import assert_same, step
from torch import Tensor, nn

from aoquant import QATConfig, calibrate, quantize_
from aoquant.calibrate import uncalibrated
from aoquant.config import WeightConfig
from aoquant.recipes import get_recipe, list_recipes

OWN = [r.name for r in list_recipes() if isinstance(r.make(), WeightConfig)]
NAMES = [
    *OWN,
    "torchao-int8",
    "torchao-int8-int4",
    "gridflip-search-c0.2/mxfp4-quest",
    "te-nvfp4/xx-nvfp4",
    "int4-tinygemm-cpu-g32/",
]
DEFAULTS = (torch.bfloat16, torch.float16, torch.float64)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


def outputs(name: str) -> dict[str, Tensor]:
    """The output and gradients of a prepared bfloat16 layer, and the converted layer's output."""
    draws = torch.Generator().manual_seed(4)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draws, dtype=torch.float32, device="cpu").bfloat16()

    model = nn.Sequential(nn.Linear(128, 32, dtype=torch.bfloat16, device="cpu"))
    model.load_state_dict({"0.weight": drawn(32, 128) / 8, "0.bias": drawn(32)})
    x = drawn(16, 128)
    quantize_(model, get_recipe(name).prepare())
    if uncalibrated(model):
        calibrate(model, [drawn(64, 128)])
    found = step(model, x, torch.ones(16, 32, dtype=torch.bfloat16, device="cpu"))
    quantize_(model, QATConfig(step="convert"))
    converted = model(x).detach()
    assert torch.equal(converted, found["y"]) and converted.device.type == "cpu"
    return found


@pytest.mark.parametrize("name", NAMES)
def test_other_defaults(name: str) -> None:
    torch.set_default_dtype(torch.float32)
    want = outputs(name)
    for dtype in DEFAULTS:
        torch.set_default_dtype(dtype)
        assert_same(outputs(name), want)
    torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        assert_same(outputs(name), want)
