"""float16 weights: what a recipe or a format makes of one is within 1 dB of what it makes of the same weight in
float32, or conversion warns of the layer by its name.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from support.expert_cases import made
from torch import Tensor, nn

from aoquant import (
    AoquantWarning,
    PackedWeightConfig,
    QATConfig,
    get_format,
    get_recipe,
    list_formats,
    list_recipes,
    quantize_,
)
from aoquant.formats import as_operand
from aoquant.linear.tensor import PackedTensor
from aoquant.planning import half
from aoquant.targets import resolve

SIZES = (0.1, 2e-3, 1e-4)
OTHERS = ("intx4-g32-asym", "intx4-g32-noclip", "intx8-row-sfloat32", "stretched2-g32", "stretched4-row", "q4_0")
RECIPES = [r.name for r in list_recipes() if not r.kv_cache]  # their layers are another recipe's
EXPERTS = [name for name in RECIPES if get_recipe(name).experts]


def _weight(largest: float) -> Tensor:
    w = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    return (w / w.abs().max() * largest).half()


def _decibels(w: Tensor, values: Tensor) -> float:
    error = w.double() - values.double()
    return float(10 * torch.log10(w.double().square().sum() / error.square().sum()))


def _quantised(w: Tensor, config: Any) -> tuple[float, list[str]]:
    """dB of the converted weight, and the warnings about float16; ValueError where the recipe refuses the layer."""
    model = nn.Sequential(nn.Linear(w.shape[1], w.shape[0], bias=False)).to(w.dtype)
    model[0].weight.data.copy_(w)
    with warnings.catch_warnings(record=True, action="always", category=AoquantWarning) as seen:
        quantize_(model, config)
    weight = model[0].weight
    if isinstance(weight, PackedTensor):
        values = weight.dequantize(torch.float32)
    elif type(weight).__name__ == "Int4OpaqueTensor":  # in a layout of its kernel's
        values = model(torch.eye(w.shape[1], dtype=w.dtype)).t()
    else:
        values = weight.dequantize()
    return _decibels(w, values), [str(s.message) for s in seen if "weight's float16" in str(s.message)]


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in EXPERTS])
def test_every_recipe_keeps_a_float16_weight_or_warns_by_name(name: str) -> None:
    config = get_recipe(name).make()
    if name in ("int8-static", "vllm-nvfp4", "nvfp4-wush", "mxfp4-wush"):  # they want calibration, for activations
        config = PackedWeightConfig(resolve(config).recipe.fprop_weight.format.name, None)
    refused = list[float]()
    for size in SIZES:
        w = _weight(size)
        try:
            kept, said = _quantised(w, config)
        except ValueError:  # its kernel takes no float16, and saying so is loud
            refused.append(size)
            continue
        full, nothing = _quantised(w.float(), config)
        assert not nothing
        assert all(s.startswith("0: ") for s in said)
        assert said or kept > full - 1, (size, kept, full)
        assert not said or size < 0.1, (kept, full)
    assert not refused or (name.startswith("torchao-") and refused == list(SIZES))


@pytest.mark.parametrize("name", [*list_formats(), *OTHERS])
def test_every_format_that_loses_in_float16_is_found(name: str) -> None:
    format = get_format(name)
    found = []
    for size in SIZES:
        w = _weight(size)
        e = format.encode(w)
        kept = _decibels(w, format.decode(e, torch.float32))
        full = _decibels(w, format.decode(format.encode(w.float()), torch.float32))
        found.append(half.share_lost(as_operand(format), e, w))
        assert found[-1] > 0.01 or kept > full - 1, (size, kept, full)
        assert half.share_lost(as_operand(format), format.encode(w.bfloat16()), w.bfloat16()) == 0
    if name in ("fp8-e5m2-row", "intx8-row"):
        assert found[0] == 0 and min(found[1:]) > 0.9


def _said_by(model: nn.Module, config: Any) -> list[str]:
    with warnings.catch_warnings(record=True, action="always", category=AoquantWarning) as seen:
        quantize_(model, config)
    return sorted(str(s.message) for s in seen if "weight's float16" in str(s.message))


@pytest.mark.parametrize("name", [*EXPERTS, "stretched2-g32/"])
def test_stacked_experts_are_warned_of_once_a_parameter(name: str) -> None:
    experts = made("mixtral", "eager", torch.float16)
    with torch.no_grad():
        for p in experts.parameters():
            p.mul_(2e-4)
    losing = ["experts.down_proj", "experts.gate_up_proj"] if name.startswith("stretched") else []
    said = _said_by(experts, QATConfig(name, step="prepare"))
    assert [s.split(":")[0] for s in said] == losing
    assert said == _said_by(experts, QATConfig(step="convert"))


def test_a_part_of_the_rows_and_rows_of_zeros_count_as_they_are() -> None:
    operand = as_operand(get_format("intx8-row"))
    w = _weight(0.1)
    w[:16] *= 2e-3
    w[16:32] = 0
    w[32:48] = w[32:48, :1]  # constant rows are exact but for the last bits of a scale
    assert half.share_lost(operand, operand.encode(w), w) == 16 / 64


@pytest.mark.parametrize("name", ["torchao-int8", "torchao-int8-int4", "stretched2-g32/", "int8", "mxfp4", "int4-g32"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_prepare_warns_as_convert_does(name: str, dtype: torch.dtype) -> None:
    found = []
    for size in SIZES:
        model = nn.Sequential(nn.Linear(256, 64, bias=False)).to(dtype)
        model[0].weight.data.copy_(_weight(size))
        said = _said_by(model, QATConfig(name, step="prepare"))
        assert said == _said_by(model, QATConfig(step="convert"))
        found += said
    assert bool(found) == (dtype == torch.float16 and name in ("torchao-int8", "torchao-int8-int4", "stretched2-g32/"))
