"""The codec: operations on one matrix beside the GEMM, in twelve roles for which backends compete in the router.

    encode    x -> codes and scales
    hold      x and scales from elsewhere -> codes
    decode    codes and scales -> the operand, or the values, of a GEMM
    quantize  x -> the operand or the values, and the codes too if they will be read: both in one pass over x
    transform x -> what a transformed operand rounds of it, or a gradient back
    fitted    x -> codes and scales behind a fitted transform, whose matrices are given
    rotate    x -> x after a rotation by drawn signs
    saturate  x -> which of its values are clipped, a bit each
    transpose codes of x -> codes of x^T, in a square format
    operands  x -> the operands of x and of x^T without their codes: both in one pass over x
    both      x -> the codes and the operand of x, and codes of x^T: both in one pass over x
    sides     x -> codes of x, and codes of x^T, in a square format: both in one pass over x

A function here asks the router for the fastest backend and runs it. `reference.py` is `Format` itself, some rows at a
time on a CPU (`tiles.py`); `triton_kernels.py` says which Triton kernels there are, `cuda.py` which of csrc's, and
`cpu.py` which of csrc/cpu's. A forced backend rules the roles that it has; the others choose freely.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from aoquant.formats import Encoded, Format, HighPrecision, Operand, Random, Scales, as_operand
from aoquant.transforms import RoundedHadamard

from ..router import BothCoded, CodecRequest, CodesAndValues, CodesOfBoth, Operands, register, routed
from . import cpu, cuda, fitted, reference, triton
from .reference import masked
from .triton import finds_outer, has_triton, lacks_triton

__all__ = [
    "both_coded",
    "decode",
    "encode",
    "encode_fitted",
    "encode_with_values",
    "finds_outer",
    "has_triton",
    "hold",
    "lacks_triton",
    "masked",
    "operands",
    "saturated",
    "sides",
    "transform",
    "transposed",
]

register(*reference.BACKENDS, *triton.BACKENDS, *cuda.BACKENDS, *fitted.BACKENDS, *cpu.BACKENDS)


def encode(operand: Operand | Format, x_RK: Tensor) -> Encoded:
    """`operand.encode(x_RK)`, on the fastest backend."""
    if not isinstance(operand, Operand):
        operand = Operand(operand)
    operand, x_RK = _first(operand, x_RK)
    rows, k = x_RK.shape
    return routed(CodecRequest, "encode", operand, x_RK.device, x_RK.dtype, rows, k).run(operand, x_RK)


def hold(format: Format, x_RK: Tensor, s: Scales) -> Encoded:
    """`format.encode(x_RK, s)`: codes under scales that are not made from x_RK now; the result may share them.

    s: of `format.measure`, of any matrix. Kernels rely on the least that it makes: under less, zeros have other codes.
    """
    operand, x_RK = _first(Operand(format), x_RK)
    rows, k = x_RK.shape
    return routed(CodecRequest, "hold", operand, x_RK.device, x_RK.dtype, rows, k).run(operand, x_RK, s)


def decode(
    format: Format | Operand, e: Encoded, dtype: torch.dtype, *, operand: bool = False, out: torch.dtype | None = None
) -> Tensor:
    """`format.decode(e, dtype)`, or `format.operand`, then cast to `out`. Codes know no transform, so an operand stands
    for its format.
    """
    format = format.format.narrow if isinstance(format, Operand) else format.narrow
    found = routed(CodecRequest, "decode", format, e.codes.device, dtype, e.codes.shape[0], e.k)
    return found.run(format, e, dtype, operand, out or dtype)


def encode_with_values(
    operand_: Operand | Format,
    x_RK: Tensor,
    dtype: torch.dtype,
    *,
    operand: bool = False,
    keep: bool = False,
    measured: Tensor | None = None,
    random: Random | None = None,
) -> CodesAndValues:
    """`operand_.encode(x_RK)` if `keep`, and what it stands for in `dtype`: decoded values, or a GEMM's `operand` and
    its alpha.

    measured: alpha of an earlier call for these very values, from which a backend need not look for a scale of the
        whole again.
    random: where the numbers come from, for an operand that draws.
    """
    made = operand_ if isinstance(operand_, Operand) else Operand(operand_)
    if made.transform is not None and made.transform.drawn and not made.format.draws:
        assert random is not None
        turns = routed(CodecRequest, "rotate", made, x_RK.device, x_RK.dtype, *x_RK.shape)
        x_RK, random, made = turns.run(made, x_RK, random), None, Operand(made.format)
    made, x_RK = _first(made, x_RK)
    rows, k = x_RK.shape
    found = routed(CodecRequest, "quantize", made, x_RK.device, x_RK.dtype, rows, k, keep)
    return found.run(made, x_RK, dtype, operand, keep, measured, random)


def _first(operand: Operand, x_RK: Tensor) -> tuple[Operand, Tensor]:
    """Widen x, or apply a transform whose result has x's dtype, before any backend, which then has a plain matrix."""
    if operand.transform is None:
        return (operand.narrow, x_RK.float()) if operand.format.narrow_of_float32 else (operand, x_RK)
    apart = _apart(operand)
    return (operand, x_RK) if apart is None else (apart.after, transform(apart.transform, x_RK, None))


class _Apart(NamedTuple):
    """An operand behind a rounded transform as two: its transform alone, and what encodes the result."""

    transform: Operand
    after: Operand


@cache
def _apart(operand: Operand) -> _Apart | None:
    """None where the transform is part of the encoding. Made once: a training step asks four times."""
    if not isinstance(operand.transform, RoundedHadamard):
        return None
    return _Apart(Operand(HighPrecision(), operand.transform.exact), Operand(operand.format))


def transform(
    operand: Operand, x_RK: Tensor, matrix: Tensor | None, *, back: bool = False, clipped: Tensor | None = None
) -> Tensor:
    """`operand.transformed(x_RK, matrix)`, or back: `operand.pull_back(masked(x_RK, clipped), matrix)`."""
    rows, k = x_RK.shape
    found = routed(CodecRequest, "transform", operand, x_RK.device, x_RK.dtype, rows, k)
    return found.run(operand, x_RK, matrix, back, clipped)


def encode_fitted(operand: Operand, x_RK: Tensor, matrix: Tensor | None) -> Encoded:
    """Codes and scales of `operand.transformed(x_RK, matrix)`, of a fitted transform."""
    rows, k = x_RK.shape
    return routed(CodecRequest, "fitted", operand, x_RK.device, x_RK.dtype, rows, k).run(operand, x_RK, matrix)


def saturated(operand: Operand | Format, x_RK: Tensor, matrix: Tensor | None = None) -> Tensor:
    """(R, ceil(K / 8)) uint8: bits of the values that are clipped when x_RK is encoded; matrix: of a fitted
    transform.
    """
    operand = as_operand(operand)
    if operand.transform is None:
        operand, x_RK = _first(operand, x_RK)
    rows, k = x_RK.shape
    return routed(CodecRequest, "saturate", operand, x_RK.device, x_RK.dtype, rows, k).run(operand, x_RK, matrix)


def operands(
    x_MN: Tensor,
    rows: Operand | None,
    columns: Operand | None,
    m_padded: int,
    n_padded: int,
    dtype: torch.dtype,
    row_random: Random | None = None,
    column_random: Random | None = None,
) -> Operands:
    """What GEMMs multiply in `dtype` of x along N, encoded as `rows`, and of x^T along M, as `columns`; None: not that
    one.

    m_padded, n_padded: the lengths of the contracted axes, with zeros. row_random, column_random: where the numbers
        come from, for operands that draw.
    """
    operand = rows or columns
    assert operand is not None
    request = CodecRequest, "operands", operand, x_MN.device, x_MN.dtype, *x_MN.shape, False, columns
    made: Operands = routed(*request).run(x_MN, rows, columns, m_padded, n_padded, dtype, row_random, column_random)
    return made


def both_coded(x_MK: Tensor, rows: Operand, columns: Operand, m_padded: int) -> BothCoded:
    """`encode_with_values` of x along K, of the operand in x's dtype, and `encode` of x^T along M, padded with zeros.

    m_padded: the length of M, with zeros.
    """
    request = CodecRequest, "both", rows, x_MK.device, x_MK.dtype, *x_MK.shape, True, columns
    made: BothCoded = routed(*request).run(x_MK, rows, columns, m_padded)
    return made


def transposed(operand: Operand, codes: Tensor, k: int, padded: int) -> Tensor:
    """uint8 codes (R, bytes of k) of a square format -> (k, bytes of padded), those of the transpose, zero behind R."""
    request = CodecRequest, "transpose", operand, codes.device, torch.uint8, codes.shape[0], k
    made: Tensor = routed(*request).run(codes, k, padded, operand.format.bits)
    return made


def sides(operand: Operand, x_RK: Tensor, padded: int) -> CodesOfBoth:
    """Codes and scales of x_RK in a square format, and codes of its transpose as `transposed` moves them."""
    request = CodecRequest, "sides", operand, x_RK.device, x_RK.dtype, *x_RK.shape
    made: CodesOfBoth = routed(*request).run(operand, x_RK, padded)
    return made
