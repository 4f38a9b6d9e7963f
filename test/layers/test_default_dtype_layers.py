"""Layers under another default dtype or device: prepared equals converted, and both are what float32 on a CPU as the
default gives, to the byte.

A model says its dtype and device; `torch.set_default_dtype` and `torch.set_default_device`, which model loaders set for
a while, are no part of them.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import aoquant
from aoquant import QATConfig, quantize_
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


def outputs(name: str, dtype: torch.dtype) -> list[Tensor]:
    """(prepared, converted, the input's and the weight's gradient) of a layer of `dtype`."""
    draws = torch.Generator().manual_seed(4)
    layer = nn.Linear(128, 32, dtype=dtype, device="cpu")
    with torch.no_grad():
        layer.weight.copy_(torch.randn(32, 128, generator=draws, dtype=torch.float32, device="cpu") * 0.1)
        assert layer.bias is not None
        layer.bias.copy_(torch.randn(32, generator=draws, dtype=torch.float32, device="cpu"))
    model = nn.Sequential(layer)
    x = torch.randn(16, 128, generator=draws, dtype=torch.float32, device="cpu").to(dtype).requires_grad_()
    calibration = torch.randn(64, 128, generator=draws, dtype=torch.float32, device="cpu").to(dtype)
    recipe = get_recipe(name)
    quantize_(model, recipe.prepare())
    if isinstance(recipe.make(), WeightConfig):
        prepared = model[0].prepared.recipe  # type: ignore[union-attr]
        if prepared.fitted or prepared.input_scales == "static":
            aoquant.calibrate(model, lambda m: m(calibration))
    y = model(x)
    y.backward(torch.ones_like(y))
    weight = model[0].weight.grad
    assert x.grad is not None and isinstance(weight, Tensor)
    quantize_(model, QATConfig(step="convert"))
    return [y.detach(), model(x).detach(), x.grad, weight]


@pytest.mark.parametrize("name", NAMES)
def test_prepared_and_converted(name: str) -> None:
    dtype = torch.bfloat16
    torch.set_default_dtype(torch.float32)
    want = outputs(name, dtype)
    assert torch.equal(want[0], want[1])
    for other in DEFAULTS:
        torch.set_default_dtype(other)
        for what, a, b in zip(("prepared", "converted", "dx", "dW"), outputs(name, dtype), want, strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b), (other, what)


@pytest.mark.parametrize("name", NAMES)
def test_beside_another_default_device(name: str) -> None:
    with torch.device("meta"):
        got = outputs(name, torch.bfloat16)
    for what, a, b in zip(("prepared", "converted", "dx", "dW"), got, outputs(name, torch.bfloat16), strict=True):
        assert a.device.type == "cpu" and torch.equal(a, b), what
