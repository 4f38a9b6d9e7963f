"""Inputs without rows: every target and every recipe returns an output without rows, prepared and converted."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.linear_cases import BY_NAME, Case
from support.moe_models import model_of
from torch import nn
from torchao.quantization import (
    Float8DynamicActivationFloat8WeightConfig,
    Float8StaticActivationFloat8WeightConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8StaticActivationInt8WeightConfig,
    PerRow,
    PerTensor,
)
from torchao.quantization.quantize_.common import KernelPreference

from aoquant import PackedTensor, QATConfig, calibrate, get_recipe, list_recipes, quantize_
from aoquant.calibrate import uncalibrated
from aoquant.experts.families import experts_of

BF16 = torch.bfloat16
STATIC: dict[str, Any] = {
    "int8-static": Int8StaticActivationInt8WeightConfig(granularity=PerTensor()),
    "int8-static-row": Int8StaticActivationInt8WeightConfig(granularity=[PerTensor(), PerRow()]),
    "fp8-static": Float8StaticActivationFloat8WeightConfig(),
}
RECIPES = [recipe.name for recipe in list_recipes() if "experts" not in recipe.name and not recipe.kv_cache]
NOT_PACKED = {"torchao-fp8-int4", "torchao-int4-preshuffled", "torchao-int4-tile-packed"}  # without their GPU kernels


def check(config: Any, n: int, k: int, dtype: torch.dtype, *, converts: bool = True) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(k, n, dtype=dtype))
    quantize_(model, QATConfig(config))
    if uncalibrated(model):
        calibrate(model, [torch.randn(8, k, dtype=dtype)])
    models = [model]
    if converts:
        models.append(copy.deepcopy(model))
        quantize_(models[1], QATConfig(step="convert"))
    for shape in ((0, k), (2, 0, k), (0, 3, k)):
        for made in models:
            for needs in (False, True):
                x = torch.empty(shape, dtype=dtype, requires_grad=needs)
                with torch.set_grad_enabled(needs):
                    y = made(x)
                assert y.shape == (*shape[:-1], n) and y.dtype == dtype
            if made is model:
                y.sum().backward()
                assert x.grad is not None and x.grad.shape == shape
                assert not model[0].weight.grad.any()


# one of each pair of format and kernel: widths and rules of rounding change nothing
@pytest.mark.parametrize("case", [c for c in BY_NAME.values() if not c.variant], ids=lambda c: c.name)
def test_a_layer_of_a_case(case: Case) -> None:
    check(case.config, case.n, case.k, case.dtypes[0])


@pytest.mark.parametrize("name", RECIPES)
def test_a_layer_of_a_recipe(name: str) -> None:
    check(get_recipe(name).make(), 128, 256, BF16, converts=name not in NOT_PACKED)


@pytest.mark.parametrize("name", STATIC)
def test_a_layer_with_static_scales(name: str) -> None:
    check(STATIC[name], 48, 64, BF16)


CONVERTED: dict[str, Any] = {
    "int8": Int8DynamicActivationInt8WeightConfig(),
    "fp8": Float8DynamicActivationFloat8WeightConfig(granularity=PerTensor(), kernel_preference=KernelPreference.TORCH),
}


@pytest.mark.parametrize("name", CONVERTED)
def test_a_gradient_and_autocast_pass_through_a_converted_layer(name: str) -> None:
    model = nn.Sequential(nn.Linear(64, 32, dtype=BF16))
    quantize_(model, CONVERTED[name])
    assert not isinstance(model[0].weight.data, PackedTensor)
    x = torch.empty(0, 64, dtype=BF16, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape
    with torch.autocast("cpu", dtype=BF16):
        assert model(torch.empty(0, 64)).shape == (0, 32)


@pytest.mark.parametrize("way", ["eager", "grouped_mm"])
@pytest.mark.parametrize("recipe", ["int4-g32-experts", "mxfp4-experts", "vllm-w4a16-g32-experts"])
def test_experts_that_get_no_token(recipe: str, way: str) -> None:
    model = model_of("mixtral")
    quantize_(model, QATConfig(recipe))
    converted = copy.deepcopy(model)
    quantize_(converted, QATConfig(step="convert"))
    for made in (model, converted):
        made.set_experts_implementation(way)
        experts = next(iter(experts_of(made).values()))
        x = torch.empty(0, made.config.hidden_size, dtype=next(made.parameters()).dtype)
        assert experts(x, torch.empty(0, 2, dtype=torch.long), torch.empty(0, 2, dtype=x.dtype)).shape == x.shape


@pytest.mark.slow
def test_a_compiled_layer_takes_any_number_of_rows() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(64, 32, dtype=BF16))
    quantize_(model, CONVERTED["int8"])
    compiled = torch.compile(model, dynamic=True, fullgraph=True, backend="aot_eager")
    for rows in (5, 7, 0, 9):
        x = torch.randn(rows, 64, dtype=BF16)
        with torch.no_grad():
            assert torch.equal(compiled(x), model(x))
