"""A backward by hand for layers with one cast per operand: every operand encoded by its format, float32 sums."""

from __future__ import annotations

from math import lcm
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from aoquant import get_format, quantize_
from aoquant.formats import Encoded, Random
from aoquant.formats.operand import Operand, as_operand
from aoquant.formats.random import DGRAD_GRAD_OUTPUT, WGRAD_GRAD_OUTPUT
from aoquant.linear.prepared import QATLinear

M, N, K = 50, 128, 256  # M is a multiple of no block, N and K of all
FORMATS = ("te-fp8-tensor", "te-fp8-1x128", "mxfp8", "mxfp4", "te-nvfp4")
BF16 = torch.bfloat16


def layer(config: Any, dtype: torch.dtype = BF16, n: int = N, k: int = K) -> QATLinear:
    """One prepared layer; a plain nn.Linear for None."""
    torch.manual_seed(3)
    model = nn.ModuleDict({"layer": nn.Linear(k, n, dtype=dtype)})
    if config is not None:
        quantize_(model, config)
    return model["layer"]  # type: ignore[return-value]


def data(dtype: torch.dtype = BF16, m: int = M, n: int = N, k: int = K) -> tuple[Tensor, Tensor]:
    """x (M, K) and dy (M, N)."""
    generator = torch.Generator().manual_seed(5)
    return torch.randn(m, k, generator=generator).to(dtype), torch.randn(m, n, generator=generator).to(dtype)


def named(name: str | None) -> Operand | None:
    return None if name is None else as_operand(get_format(name))


def values(name: str | None, t: Tensor) -> Tensor:
    """What fprop makes of t, in its dtype."""
    operand = named(name)
    return t if operand is None else operand.decode(operand.encode(t), t.dtype)


def encoded(name: str, t: Tensor, multiple: int, random: Random | None = None) -> Encoded:
    operand = named(name)
    assert operand is not None
    return operand.encode(F.pad(t, (0, -t.shape[1] % multiple)), random=random if operand.draws else None)


def product(
    a: Tensor,
    b: Tensor,
    a_as: str | None,
    b_as: str | None,
    state: Tensor | None = None,
    side: int = 0,
    sums: torch.dtype = torch.float64,
) -> Tensor:
    """a b^T, both operands quantised along their last axis, rounded once to a's dtype."""
    operands, alphas = [], []
    multiple = lcm(*(operand.period for name in (a_as, b_as) if (operand := named(name)) is not None))
    for i, (t, name) in enumerate(((a, a_as), (b, b_as))):
        operand = named(name)
        if operand is None:
            operands.append(t.to(sums))
            continue
        random = None if state is None else Random(state, side + i)
        e = encoded(str(name), t, multiple, random)
        operands.append(operand.format.operand(e, torch.float32).to(sums))
        alphas.append(operand.format.alpha(e))
    width = max(o.shape[1] for o in operands)
    a_MK, b_NK = (F.pad(o, (0, width - o.shape[1])) for o in operands)
    y = a_MK @ b_NK.t()
    for alpha in alphas:
        y = y if alpha is None else y * alpha.to(sums)
    return y.to(a.dtype)


def reference(config: Any, linear: nn.Linear, x: Tensor, g: Tensor, state: Tensor | None = None) -> dict[str, Tensor]:
    """dx and dW of a HybridConfig, by hand."""
    w = linear.weight.detach()
    forward_w = values(config.fprop_weight.format, w)
    forward_x = values(config.fprop_input.format, x)
    w = forward_w if config.dgrad_weight.source == "forward" else w
    x = forward_x if config.wgrad_input.source == "forward" else x
    along_n = config.dgrad_grad_output.format, config.dgrad_weight.format
    along_m = config.wgrad_grad_output.format, config.wgrad_input.format
    return {
        "x": product(g, w.t(), *along_n, state, DGRAD_GRAD_OUTPUT),
        "weight": product(g.t(), x.t(), *along_m, state, WGRAD_GRAD_OUTPUT),
    }


def differing(got: Tensor, wanted: Tensor) -> float:
    """Share of elements that differ, none by more than one step of bfloat16."""
    close = (got.float() - wanted.float()).abs() <= wanted.float().abs() * 2.0**-7 + 1e-30
    assert close.all(), "some element is more than one step of bfloat16 away"
    return float((got != wanted).float().mean())


def slope(got: Tensor, wanted: Tensor) -> float:
    """Of the line through the origin that fits got over wanted: 1 where rounding neither shrinks nor grows."""
    return float((got.double() * wanted.double()).sum() / wanted.double().square().sum())
