"""Converted linear layers, and the general path that they are compared with."""

from __future__ import annotations

import pytest
import torch
from support.linear_cases import BF16, BY_NAME, assert_equal, layer
from torch import Tensor, nn
from torch.nn import functional as F

from aoquant import quantize_
from aoquant.linear.packed import PackedLinear

CASES = ["int4-g32", "nvfp4-act", "nvfp4-h16", "fp8-row-act", "mxfp8-act"]
cases = pytest.mark.parametrize("name", CASES)


def packed(name: str, bias: bool = True, kind: str = "normal") -> PackedLinear:
    case = BY_NAME[name]
    model = nn.Sequential(layer(case, BF16, bias=bias, kind=kind))
    quantize_(model, case.config)
    assert type(model[0]) is PackedLinear
    return model[0].requires_grad_(False)


def general(module: nn.Linear, x: Tensor) -> Tensor:
    """Under gradients, where nothing is remembered."""
    with torch.enable_grad():
        return F.linear(x, module.weight, module.bias)


def same(module: nn.Linear, x: Tensor) -> None:
    """Eager and compiled equal the general path."""
    want = general(module, x)
    with torch.no_grad():
        assert_equal(module(x), want, "module")
        assert_equal(F.linear(x, module.weight, module.bias), want, "F.linear")
        torch._dynamo.reset()
        assert_equal(torch.compile(module, backend="aot_eager", fullgraph=True)(x), want, "compiled")
