"""float16 models: aoquant's packed tensors keep float32's quality, and what was packed before keeps its numbers."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aoquant import PackedTensor, QATConfig, quantize_, refresh_, report, unpack_
from aoquant.config import Packed4WeightConfig, PackedWeightConfig
from aoquant.formats import get_format, get_operand
from aoquant.linear.prepared import Prepared, QATLinear
from aoquant.linear.recipe import LinearRecipe
from aoquant.linear.tensor import same_bits

F16 = torch.float16
WIDENED = ("int8-row", "int8-tensor", "int8-g32", "int8-row-asym", "fp8-row", "fp8-tensor", "fp8-e5m2-row", "fp8-e5m2-tensor", "fp8-1x128",
           "fp8-128x128", "intx8-row-sfloat32", "intx4-row", "intx6-g32", "intx4-g32-asym", "intx3-g32-noclip", "intx8-row")  # fmt: skip


def config(name: str) -> Any:
    return (Packed4WeightConfig if get_operand(name).bits <= 4 else PackedWeightConfig)(name)


def values(size: float, dtype: torch.dtype = F16) -> Tensor:
    w = torch.randn(48, 256, generator=torch.Generator().manual_seed(0))
    return (w / w.abs().max() * size).to(dtype)


def model_of(size: float, dtype: torch.dtype = F16) -> nn.Sequential:
    layer = nn.Linear(256, 48, bias=False, dtype=dtype)
    layer.weight.data = values(size, dtype)
    return nn.Sequential(layer)


def decibels(size: float, dtype: torch.dtype, name: str) -> float:
    model = model_of(size, dtype)
    w = model[0].weight.data.double()
    quantize_(model, config(name))
    return float(
        10 * math.log10(w.square().sum() / (w - model[0].weight.dequantize(torch.float32).double()).square().sum())
    )


@pytest.mark.parametrize("size", [0.1, 0.002, 1e-4])
@pytest.mark.parametrize("name", WIDENED)
def test_small_weights_keep_the_quality_of_float32(name: str, size: float) -> None:
    with warnings.catch_warnings():
        # intx stores scales in the model's dtype, whose last bits show in 8 bits at the smallest size
        warnings.simplefilter("error" if size > 1e-3 else "ignore")
        assert decibels(size, F16, name) >= decibels(size, torch.float32, name) - (1 if size > 1e-3 else 3)


@pytest.mark.parametrize("name", WIDENED)
@pytest.mark.parametrize("scales", ["dynamic", "static"])
def test_prepared_equals_converted(name: str, scales: str) -> None:
    model, x = model_of(0.002), torch.randn(3, 256).half()
    quantize_(model, QATConfig(config(name), scales=scales))
    y = model(x).detach()
    assert model[0].prepared.recipe.fprop_weight.name == f"{name}-wide"
    served = copy.deepcopy(model)
    quantize_(served, QATConfig(step="convert"))
    packed = served[0].weight
    assert packed.format == name and torch.equal(served(x), y)
    if scales == "dynamic":
        at_once = model_of(0.002)
        quantize_(at_once, config(name))
        assert same_bits(at_once[0].weight, packed)
        refresh_(served, model)
        assert same_bits(served[0].weight, packed)
    assert report(model, served, [x]).rows[0].format == name
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), y)
    unpack_(served)
    assert torch.equal(served(x), y)


@pytest.mark.parametrize("name", ["intx8-row", "fp8-e5m2-row", "int8-g32"])
def test_what_was_made_before_keeps_its_numbers(name: str) -> None:
    """Packed weights, and prepared layers whose recipe says how they encode, as pickles hold them."""
    w, format, x = values(0.002), get_format(name), torch.randn(3, 256).half()
    old = format.encode(w)
    recipe = LinearRecipe(None, format)
    model = model_of(0.002)
    model[0].weight = nn.Parameter(PackedTensor.from_encoded(old, recipe, F16), requires_grad=False)
    assert torch.equal(model[0].weight.dequantize(), format.decode(old, F16))
    before, y = model[0].weight, model(x)
    unpack_(model)
    assert torch.equal(model(x), y)
    quantize_(model, QATConfig(step="convert"))
    assert same_bits(model[0].weight, before)
    layer = model_of(0.002)
    QATLinear.prepare(layer[0], Prepared(recipe, QATConfig(config(name)), "0"))
    assert torch.equal(layer(x), y)
    quantize_(layer, QATConfig(step="convert"))
    assert same_bits(layer[0].weight, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_other_dtypes_are_encoded_as_ever(dtype: torch.dtype) -> None:
    model = model_of(0.002, dtype)
    quantize_(model, QATConfig(config("fp8-e5m2-row")))
    assert model[0].prepared.recipe.fprop_weight.name == "fp8-e5m2-row"
