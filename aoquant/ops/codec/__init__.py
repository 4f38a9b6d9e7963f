"""The codec: operations on one matrix beside the GEMM, in six roles for which backends compete in the router.

    quantize   x -> codes and scales, or what a GEMM multiplies, or both in one pass: an `Ask` says which
    sides      the same of x and of x^T, in one pass over x
    decode     codes and scales -> the operand, or the values, of a GEMM
    transform  x -> what a transformed operand rounds of it, or a gradient back
    saturate   x -> which of its values are clipped, a bit each
    transpose  codes of x -> codes of x^T, in a square format

A function here asks the router for the fastest backend and runs it. What no backend makes at once (both sides, a
transform and what follows it, a mask) is made in steps, here. `reference.py` is `Format` itself, some rows at a time on
a CPU (`tiles.py`); `triton_kernels.py` says which Triton kernels there are, `cuda.py` which of csrc's, and
`cpu_codec.py` which of csrc/cpu's. A forced backend rules the roles that it has; the others choose freely.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from aoquant.formats import Encoded, Format, HighPrecision, Operand, Random, Scales, as_operand, layout
from aoquant.transforms import RoundedHadamard

from ..quantized import CODES, Ask, Quantized, Side
from ..router import CodecRequest, fused, register, routed
from . import cpu_codec, cuda, fitted, reference, triton
from .reference import masked
from .triton import finds_outer, has_triton, lacks_triton

__all__ = [
    "decode",
    "encode",
    "finds_outer",
    "has_triton",
    "lacks_triton",
    "longer",
    "masked",
    "quantize",
    "saturated",
    "sides",
    "transform",
    "transposed",
]

register(*reference.BACKENDS, *triton.BACKENDS, *cuda.BACKENDS, *fitted.BACKENDS, *cpu_codec.BACKENDS)


def encode(operand: Operand | Format, x_RK: Tensor, held: Scales | None = None) -> Encoded:
    """`operand.encode(x_RK, held)`, on the fastest backend; the result may share `held`.

    held: of `format.measure`, of any matrix. Kernels rely on the least that it makes: under less, zeros have other
        codes.
    """
    return quantize(as_operand(operand), x_RK, CODES if held is None else Ask(held=held)).codes


def quantize(operand: Operand, x_RK: Tensor, ask: Ask) -> Side:
    """Make what `ask` asks for of x (R, K), along K.

    Raises:
        ValueError: the operand draws, and `ask` brings no numbers.
    """
    t, held = operand.transform, ask.held is not None and not ask.held.dynamic
    if t is None:
        if operand.format.narrow_of_float32:
            operand, x_RK = operand.narrow, x_RK.float()
    elif isinstance(t, RoundedHadamard):
        x_RK, operand = transform(_apart(operand), x_RK, None), Operand(operand.format)
    elif t.drawn and not operand.format.draws:
        x_RK, operand = transform(operand, x_RK, ask.random), Operand(operand.format)
        ask = ask._replace(random=None)
    elif held:
        x_RK, operand = _mixed(operand, x_RK, ask), Operand(operand.format)
    asked = ask.codes, ask.values is not None, held
    found = routed(CodecRequest, "quantize", operand, x_RK.device, x_RK.dtype, *x_RK.shape, *asked)
    if operand.transform is not None and ask.random is None and found.name == "reference":
        x_RK, operand = _mixed(operand, x_RK, ask), Operand(operand.format)
        found = routed(CodecRequest, "quantize", operand, x_RK.device, x_RK.dtype, *x_RK.shape, *asked)
    return found.run(operand, x_RK, ask)


def _mixed(operand: Operand, x_RK: Tensor, ask: Ask) -> Tensor:
    return transform(operand, x_RK, None if ask.held is None else ask.held.transform)


@cache
def _apart(operand: Operand) -> Operand:
    """The transform of an operand whose result has x's dtype, alone."""
    assert isinstance(operand.transform, RoundedHadamard)
    return Operand(HighPrecision(), operand.transform.exact)


def decode(
    format: Format | Operand, e: Encoded, dtype: torch.dtype, *, operand: bool = False, out: torch.dtype | None = None
) -> Tensor:
    """`format.decode(e, dtype)`, or `format.operand`, then cast to `out`. Codes know no transform, so an operand stands
    for its format.
    """
    format = format.format.narrow if isinstance(format, Operand) else format.narrow
    found = routed(CodecRequest, "decode", format, e.codes.device, dtype, e.codes.shape[0], e.k)
    return found.run(format, e, dtype, operand=operand, out=out)


def transform(
    operand: Operand,
    x_RK: Tensor,
    matrix: Tensor | Random | None,
    *,
    back: bool = False,
    clipped: Tensor | None = None,
) -> Tensor:
    """`operand.transformed(x_RK, matrix)`, or back: `operand.pull_back(masked(x_RK, clipped), matrix)`.

    matrix: of a fitted transform; or where the signs of a drawn one come from.
    """
    found = routed(CodecRequest, "transform", operand, x_RK.device, x_RK.dtype, *x_RK.shape)
    return found.run(operand, x_RK, matrix, back, clipped)


def saturated(operand: Operand | Format, x_RK: Tensor, held: Scales | None = None) -> Tensor:
    """(R, ceil(K / 8)) uint8: bits of the values that are clipped when x_RK is encoded."""
    operand = as_operand(operand)
    ask = Ask(held=held)
    if operand.transform is None and operand.format.narrow_of_float32:
        operand, x_RK = operand.narrow, x_RK.float()
    if held is None or held.dynamic:
        found = fused("saturate", operand, x_RK.device, x_RK.dtype, *x_RK.shape)
        if found is not None:
            return found.run(operand, x_RK)
    if operand.transform is not None:
        x_RK, operand = _mixed(operand, x_RK, ask), Operand(operand.format)
    clipped = operand.format.saturated(x_RK, quantize(operand, x_RK, ask).codes)
    return layout.pack(clipped.to(torch.uint8), 1)


class Lengths(NamedTuple):
    """The lengths of the axes of x (R, K) with zeros, as a GEMM contracts them: the columns' R, the rows' K."""

    r: int
    k: int


def sides(
    x_RK: Tensor, row: Operand | None, col: Operand | None, padded: Lengths, of_row: Ask, of_col: Ask
) -> Quantized:
    """x along K as `row`, and x^T along R as `col`, with zeros behind; None: not that side."""
    assert row is not None or col is not None
    of_first = of_col if row is None else of_row
    first = Operand(col.format) if row is None else row  # type: ignore[union-attr]
    if of_first.values is not None or (row is not None and col is not None):
        asked = of_first.codes, of_first.values is not None, False, col, of_col.codes
        found = fused("sides", first, x_RK.device, x_RK.dtype, *x_RK.shape, *asked)
        if found is not None:
            return found.run(x_RK, row, col, padded, of_row, of_col)
    of_x = None if row is None else quantize(row, _longer(x_RK, padded.k), of_row)
    if col is None:
        return Quantized(of_x, None)
    if of_x is not None and of_x.encoded is not None and of_col.values is None and first.shares_codes(col):
        return Quantized(of_x, Side(transposed(col, of_x.encoded, padded.r)))
    return Quantized(of_x, quantize(col, _longer(x_RK.t(), padded.r), of_col))


def transposed(operand: Operand, e: Encoded, padded: int) -> Encoded:
    """The codes (K, R) of x^T, with zeros behind R, from those (R, K) of x, in a format that is `square`."""
    codes, block = e.codes.view(torch.uint8), operand.format.block
    found = routed(CodecRequest, "transpose", operand, codes.device, torch.uint8, codes.shape[0], e.k)
    moved, scale = found.run(codes, e.k, padded, operand.format.bits), e.scale
    if scale is not None and block is not None:
        stored = scale.view(torch.uint8) if scale.element_size() == 1 else scale
        scale = longer(stored.t(), padded // block).view(scale.dtype)
    return Encoded(moved.view(e.codes.dtype), scale, e.zero, e.outer, padded)


def _longer(x_RK: Tensor, k: int) -> Tensor:
    """Return x, with zeros behind K where it is shorter."""
    return longer(x_RK, k) if k > x_RK.shape[1] else x_RK


def longer(x_RK: Tensor, k: int) -> Tensor:
    """Return a contiguous copy of x with zeros behind K: `pad`, of operators that csrc's programs know."""
    return torch.cat((x_RK, x_RK.new_zeros(x_RK.shape[0], k - x_RK.shape[1])), 1)
