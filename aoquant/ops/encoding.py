"""Ops that make codes of values, and what goes with them: back to values, gradients back through a transform, masks of
clipped values.

Scales are found on what is encoded, unless the caller holds them (`held`): static or learned ones, and the matrices of
a fitted transform. Codes behind a transform are codes of the format behind it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from aoquant.formats import Encoded, Operand, Scales, layout

from . import codec
from .define import op


class WithValues(NamedTuple):
    """An encoded matrix, and in `values` (R, K) what a GEMM reads of it."""

    encoded: Encoded
    values: Tensor


def _encoded_shapes(a: Any) -> Encoded:
    """Not tile by tile, as kernels go: the number of tiles would be a guard on x's rows."""
    e: Encoded = a.operand.encode(a.x_RK, getattr(a, "held", None))
    return e


@op(_encoded_shapes)
def encode(x_RK: Tensor, operand: Operand, held: Scales | None = None) -> Encoded:
    """Codes and scales of a 2-D tensor."""
    if held is None:
        return codec.encode(operand, x_RK)
    if operand.fitted and held.dynamic:
        return codec.encode_fitted(operand, x_RK, held.transform)
    if operand.transform is not None:
        x_RK, operand = codec.transform(operand, x_RK, held.transform), Operand(operand.format)
    if held.dynamic:
        return codec.encode(operand, x_RK)
    # copied, because an op's outputs must not alias its inputs
    return codec.hold(operand.format, x_RK, Scales(*(t if t is None else t.clone() for t in held.tensors)))


@op(lambda a: WithValues(_encoded_shapes(a), a.x_RK.new_empty(a.x_RK.shape)))
def encode_with_values(x_RK: Tensor, operand: Operand, alpha_apart: bool) -> WithValues:
    """`encode`, and in the same pass the values in x's dtype: the GEMM's operand (alpha_apart), or decoded ones."""
    made = codec.encode_with_values(operand, x_RK, x_RK.dtype, operand=alpha_apart, keep=True)
    assert made.encoded is not None
    # codes in high precision are their own values, and an op's outputs must not alias each other
    same = made.values is made.encoded.codes
    return WithValues(made.encoded, made.values.clone() if same else made.values)


@op(lambda a: a.x.codes.new_empty(a.x.codes.shape[0], a.x.k, dtype=a.dtype))
def decode(x: Encoded, operand: Operand, dtype: torch.dtype) -> Tensor:
    """(R, K) values in `dtype`."""
    values = codec.decode(operand.format, x, dtype)
    return values.clone() if values is x.codes else values  # high precision, in the dtype that it has


@op(lambda a: torch.empty_like(a.grad_RK, memory_format=torch.contiguous_format))
def pull_back(grad_RK: Tensor, operand: Operand, matrix: Tensor | None = None, clipped: Tensor | None = None) -> Tensor:
    """The gradient of what an operand encodes, from the gradient of its values, in grad's dtype: an op because
    compilers round elsewhere.

    matrix: of a fitted transform. clipped: what `saturated` gave, of values that get no gradient.
    """
    if operand.transform is not None:
        return codec.transform(operand, grad_RK, matrix, back=True, clipped=clipped)
    return grad_RK.clone() if clipped is None else codec.masked(grad_RK, clipped)


def _mask(a: Any) -> Tensor:
    x: Tensor = a.x_RK
    return x.new_empty((x if a.ids is None else a.ids).shape[0], -(-x.shape[1] // 8), dtype=torch.uint8)


@op(_mask)
def saturated(x_RK: Tensor, operand: Operand, held: Scales | None = None, ids: Tensor | None = None) -> Tensor:
    """Bit-packed mask (R, K/8) of the values that the format clips, or of rows `ids`; unpack with
    `formats.layout.unpack(mask, 1, K)`.
    """
    if ids is not None and operand.by_rows:
        x_RK, ids = x_RK.index_select(0, ids), None
    if held is None or held.dynamic:
        bits = codec.saturated(operand, x_RK, None if held is None else held.transform)
    else:
        y = codec.transform(operand, x_RK, held.transform) if operand.transform is not None else x_RK
        clipped = operand.format.saturated(y, encode.body(y, Operand(operand.format), held))
        bits = layout.pack(clipped.to(torch.uint8), 1)
    return bits if ids is None else bits.index_select(0, ids)


@op(lambda a: torch.empty_like(a.scale, dtype=torch.float32))
def scale_grad(
    grad_RK: Tensor, x_RK: Tensor, operand: Operand, count: int, scale: Tensor, zero: Tensor | None
) -> Tensor:
    """Gradient of a learned scale, float32 and of its shape, from the gradient of x's quantised values (LSQ).

    count: values that share a scale; the gradient is divided by sqrt(count * largest code), which keeps a scale's
    relative step comparable to a weight's. Source: Esser et al., "Learned Step Size Quantization", ICLR 2020, section
    2.2.
    """
    f = operand.format
    return f.scale_gradient(x_RK, Scales(scale, zero), grad_RK) / (count * f.limits[1]) ** 0.5
