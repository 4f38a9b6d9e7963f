"""`ops.matmul` and its relatives with operands by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from aoquant import ops
from aoquant.formats import Encoded, Format, Operand, Random, as_operand, get_operand
from aoquant.layers.function import codes as coded
from aoquant.ops import codec
from aoquant.ops.quantized import Ask, Side

__all__ = ["arguments", "coded", "dgrad", "operand", "parts", "scaled_mm", "wgrad", "with_values"]


def operand(name: str) -> Operand | None:
    """The operand called `name`; None for ""."""
    return get_operand(name) if name else None


def arguments(
    x: Tensor | Encoded,
    w: Tensor | Encoded,
    bias: Tensor | None,
    x_name: str,
    w_name: str,
    contract: str,
    lead: list[int],
    dtype: torch.dtype,
    values: Tensor | None = None,
    strides: list[int] | None = None,
) -> tuple[Any, ...]:
    """Arguments of `ops.matmul`."""
    return x, w, bias, operand(x_name), get_operand(w_name), contract, lead, dtype, values, strides


def scaled_mm(*args: Any, **kwargs: Any) -> Tensor:
    """y of `ops.matmul`."""
    return ops.matmul(*arguments(*args, **kwargs)).y


def with_values(
    fmt: Operand | Format,
    x: Tensor,
    dtype: torch.dtype,
    *,
    operand: bool = False,
    keep: bool = False,
    measured: Tensor | None = None,
    random: Random | None = None,
) -> Side:
    """What x stands for in `dtype`, decoded or as a GEMM's operand, and its codes if `keep`, on the codec's fastest
    backend.
    """
    return codec.quantize(as_operand(fmt), x, Ask(keep, dtype, operand, None, measured, random))


def dgrad(grad: Tensor, w: ops.Kept, pair: ops.Pair | None = None) -> Tensor:
    """dx of `ops.gradients` alone."""
    dx = ops.gradients(grad, w, pair, None, None).dx
    assert dx is not None
    return dx


def wgrad(grad: Tensor, x: ops.Kept, pair: ops.Pair | None = None) -> Tensor:
    """dW of `ops.gradients` alone."""
    dw = ops.gradients(grad, None, None, x, pair).dw
    assert dw is not None
    return dw


def parts(e: Encoded) -> list[Tensor]:
    """The tensors of an encoded matrix."""
    return [t for t in tree_leaves(tuple(e[:4])) if t is not None]
