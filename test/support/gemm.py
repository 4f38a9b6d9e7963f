"""`ops.matmul` and its relatives with operands by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from aoquant import ops
from aoquant.formats import Encoded, Format, Operand, Random, Scales, as_operand, get_operand
from aoquant.ops import Call, Request, codec, gemm_request
from aoquant.ops import codes as coded
from aoquant.ops.quantized import Ask, Side

__all__ = ["arguments", "coded", "dgrad", "kept", "operand", "parts", "request_of", "scaled_mm", "wgrad", "with_values"]


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


def kept(
    matrix: Tensor | Encoded,
    forward: Operand | None = None,
    held: Scales | None = None,
    keeps: str = "rows",
    gemm: tuple[Any, ...] = (None, None),
) -> ops.Kept:
    """What forward kept of a matrix for a GEMM of backward. gemm: the operands of both, and the contract."""
    return ops.Kept(matrix, ops.BackwardGemm(*gemm)._replace(forward=forward, keeps=keeps), held)


def dgrad(grad: Tensor, w: ops.Kept) -> Tensor:
    """dx of `ops.gradients` alone."""
    dx = ops.gradients(grad, w, None).dx
    assert dx is not None
    return dx


def wgrad(grad: Tensor, x: ops.Kept) -> Tensor:
    """dW of `ops.gradients` alone."""
    dw = ops.gradients(grad, None, x).dw
    assert dw is not None
    return dw


def request_of(call: Call) -> Request:
    """What a call asks the router for."""
    x = call.given_x
    m = x.codes.shape[0] if isinstance(x, Encoded) else x.numel() // call.k
    return gemm_request(call.contract, call.x_operand, call.w_operand, call.given_w, call.dtype, m)


def parts(e: Encoded) -> list[Tensor]:
    """The tensors of an encoded matrix."""
    return [t for t in tree_leaves(tuple(e[:4])) if t is not None]
