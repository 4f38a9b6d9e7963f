"""Weights too small for the scales that a format stores: conversion warns of them by name, and says what to do."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from aoquant import MXFP4WeightConfig, NVFP4WeightConfig, quantize_
from aoquant.formats import Scales, get_format


def test_convert_warns_of_blocks_on_the_floor_by_name() -> None:
    model = nn.Sequential(nn.Linear(256, 64), nn.Linear(64, 32))
    with torch.no_grad():
        model[0].weight.normal_(std=0.02)
        model[1].weight.zero_()  # blocks of zeros are no reason
    with pytest.warns(
        UserWarning, match=r"^0: [\d.]+% of the weight's blocks have the smallest scale that nvfp4-none stores"
    ) as seen:
        quantize_(model, NVFP4WeightConfig("none"))
    assert len(seen) == 1
    model = nn.Sequential(nn.Linear(256, 64))
    with torch.no_grad():
        model[0].weight.normal_(std=0.02)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantize_(model, NVFP4WeightConfig())
    small = nn.Linear(256, 64)
    with torch.no_grad():
        small.weight.normal_(std=1e-4)
    with pytest.warns(UserWarning, match=r"100.0% of the weight's blocks have .* xx-nvfp4-static:0.1 stores"):
        quantize_(nn.Sequential(small), NVFP4WeightConfig("static", numerics="xx"))


@pytest.mark.parametrize(
    ("config", "std", "says"),
    [
        (MXFP4WeightConfig("quest"), 1e-9, r"zero: use MXFP4WeightConfig\(\) as it is, .* or leave it out$"),
        (MXFP4WeightConfig(numerics="qutlass"), 1e-9, r"zero: use MXFP4WeightConfig\(\) as it is, .* or leave it out$"),
        (MXFP4WeightConfig("floor"), 1e-38, "zero: leave it out$"),
        (NVFP4WeightConfig(), 1.0, "zero: leave it out$"),
        (NVFP4WeightConfig("none"), 1e-4, "zero: give the weight an outer scale that fits it"),
    ],
    ids=["quest", "qutlass", "mxfp4", "nvfp4", "nvfp4-none"],
)
def test_the_warning_of_floors_advises_what_the_format_has(config: Any, std: float, says: str) -> None:
    layer = nn.Linear(256, 64)
    with torch.no_grad():
        layer.weight.normal_(std=std)
        layer.weight[0, 0] = max(std, 1e6 * (std == 1.0))  # one large value: dynamic scales fit it and nothing else
    with pytest.warns(UserWarning, match=says):
        quantize_(nn.Sequential(layer), config)


def test_constant_blocks_under_quest_are_saved_by_what_the_warning_advises() -> None:
    x = torch.full((4, 64), 0.5)
    layer = nn.Linear(64, 4)
    layer.weight.data.copy_(x)
    with pytest.warns(UserWarning, match="100.0% of the weight's blocks .* use MXFP4WeightConfig"):
        quantize_(nn.Sequential(layer), MXFP4WeightConfig("quest"))
    assert torch.equal(get_format("mxfp4").fake_quantize(x), x)


@pytest.mark.parametrize(("dtype", "floored"), [(torch.float16, True), (torch.bfloat16, False)])
def test_an_integers_scale_is_on_the_floor_of_its_own_dtype(dtype: torch.dtype, floored: bool) -> None:
    """The least positive float16 is an ordinary bfloat16."""
    fmt = get_format("intx4-g32")
    coded = fmt.encode(torch.ones(2, 64, dtype=dtype))
    assert not fmt.floored(coded).any()
    tiny = coded._replace(scale=torch.full_like(coded.scales, 2.0**-24))
    assert fmt.floored(tiny).all() == fmt.floored(tiny).any() == floored


@pytest.mark.parametrize(("largest", "floored"), [(3.0, True), (4.0, False), (6.0, False)])
def test_a_block_of_nvfp4_is_on_the_floor_where_its_largest_code_is_below_four(largest: float, floored: bool) -> None:
    """A search gives blocks 4 as their largest code, and their scales are as they should be."""
    x = torch.linspace(-1, 1, 16).view(1, 16) * largest * 2.0**-6
    for name in ("nvfp4-none", "nvfp4-search-none"):
        fmt = get_format(name)
        held = Scales(torch.full((1, 1), 2.0**-6).to(torch.float8_e4m3fn))
        assert fmt.floored(fmt.hold(x, held)).tolist() == [[floored]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_scale_that_hqq_fits_is_on_the_floor_at_float32s_eps(dtype: torch.dtype) -> None:
    fmt = get_format("intx4-g32-hqq")
    for value, floored in ((1.0, False), (2.0**-18, False), (2.0**-21, True), (0.0, True)):
        e = fmt.encode(torch.full((2, 64), value, dtype=dtype))
        assert (fmt.floored(e) == floored).all(), value
