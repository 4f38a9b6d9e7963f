"""Ops that make codes of values, and what goes with them: back to values, gradients back through a transform, masks of
clipped values.

`encode` makes either side of a matrix, codes or what a GEMM reads of them, in one pass where a kernel can (`matmul`
encodes its weight itself). Scales are found on what is encoded, unless the caller holds them (`held`): static or
learned ones, and the matrices of a fitted transform. Codes behind a transform are codes of the format behind it.
"""

from typing import Any

import torch
from torch import Tensor

from aoquant.formats import Encoded, Operand, Scales

from . import codec
from .codec import Lengths
from .define import op
from .quantized import CODES, Ask, Quantized, Side


def padded(rows: int, multiple: int) -> int:
    """The length of an axis of `rows` with zeros: a multiple of `multiple`, at least one."""
    return -(-max(rows, 1) // multiple) * multiple


def _shapes(a: Any) -> Quantized:
    """Not tile by tile, as kernels go: the number of tiles would be a guard on x's rows."""
    row = col = None
    if a.row is not None:
        row = Side(a.row.encode(a.x_RK, a.held), a.x_RK.new_empty(a.x_RK.shape) if a.reads else None)
    if a.col is not None:
        rows, k = a.x_RK.shape
        long = -(-torch.sym_max(rows, 1) // a.multiple) * a.multiple
        col = Side(a.col.encode(a.x_RK.new_empty(k, long)))
    return Quantized(row, col)


def _widths(x_RK: Tensor, *rest: Any) -> tuple[int, int]:
    """K of both sides: of x, and of x^T."""
    return x_RK.shape[1], padded(x_RK.shape[0], rest[-1])


@op(_shapes, _widths, repeated=True)
def encode(
    x_RK: Tensor,
    row: Operand | None,
    col: Operand | None = None,
    held: Scales | None = None,
    reads: str = "",
    multiple: int = 1,
) -> Quantized:
    """Codes and scales of a 2-D tensor along K, as `row`, and of its transpose along R, as `col`.

    held: of the row side. reads: "operand" or "decoded": what a GEMM reads of the row side too, in x's dtype. multiple:
    of R with zeros, as the column side has them.
    """
    if held is not None:  # copied, because an op's outputs must not alias its inputs
        held = held.copied
    asked = Ask(values=x_RK.dtype if reads else None, operand=reads == "operand", held=held)
    if col is None:
        assert row is not None
        made = Quantized(codec.quantize(row, x_RK, asked), None)
    else:
        rows, k = x_RK.shape
        if not rows:  # formats have no scale for nothing
            of_x = None if row is None else codec.quantize(row, x_RK, asked)
            made = Quantized(of_x, codec.quantize(col, x_RK.new_zeros(k, multiple), CODES))
        else:
            made = codec.sides(x_RK, row, col, Lengths(padded(rows, multiple), k), asked, CODES)
    of_x = made.row
    if of_x is None:
        return made
    # alpha follows from codes; codes in high precision are their own values, and an op's outputs must not alias
    values = of_x.values.clone() if of_x.values is not None and of_x.values is of_x.codes.codes else of_x.values
    return made._replace(row=Side(of_x.encoded, values))


def codes(x_RK: Tensor, operand: Operand, held: Scales | None = None) -> Encoded:
    """Encode x along K: codes alone."""
    made = encode(x_RK, operand, None, held).row
    assert made is not None
    return made.codes


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
    bits = codec.saturated(operand, x_RK, held)
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
