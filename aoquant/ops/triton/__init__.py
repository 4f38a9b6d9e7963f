"""Triton kernels for the codec: encode, decode, and both in one pass. Imported when a CUDA device first asks for them.

`formats/` stays the truth. Every kernel here reproduces `Format.encode`, `operand` and `decode` bit for bit, NaN, Inf,
zeros and subnormals included (`test/gpu/test_triton_exact.py`), and `why_not` says what has no kernel yet.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from aoquant.formats import (
    MX,
    NVFP4,
    Affine,
    Encoded,
    Float8,
    Float8Mslk,
    Format,
    FourOverSix,
    GridFlip,
    HighPrecision,
    Int4,
    MXFP4Dialect,
    NVFP4Dialect,
    NVFP4Search,
    Random,
    Randomized,
    Rotated,
    Transformed,
)
from aoquant.ops.router import Quantized
from aoquant.transforms import Hadamard

from . import blockscaled, dialects, float8, grids, hadamard, integer, nvfp4_rows, stochastic
from .launch import on

_Made = tuple[Encoded | None, Tensor | None, Tensor | None]


def encode(format: Format, x_RK: Tensor) -> Encoded:
    """`format.encode(x_RK)`."""
    if type(format) is Transformed:
        encoded, *_ = _mixed(format, x_RK, None, True, True, None)
    else:
        encoded, *_ = _plain(format, x_RK, None, True, True, None)
    assert encoded is not None
    return encoded


def quantize(
    format: Format,
    x_RK: Tensor,
    dtype: torch.dtype,
    operand: bool,
    keep: bool,
    measured: Tensor | None = None,
    random: Random | None = None,
) -> Quantized:
    """Codes, if `keep`, and what they stand for, reading x once, or twice when a scale of the whole is not `measured`
    yet.

    At random, codes and operand alike.
    """
    if random is not None:
        assert isinstance(format, Randomized) and operand
        with on(x_RK):
            return Quantized(*stochastic.quantize(format, x_RK, dtype, random))
    if type(format) is Transformed:
        encoded, values, alpha = _mixed(format, x_RK, dtype, operand, keep, measured)
    else:
        encoded, values, alpha = _plain(format, x_RK, dtype, operand, keep, measured)
    assert values is not None
    return Quantized(encoded, values, alpha)


def decode(format: Format, e: Encoded, dtype: torch.dtype, operand: bool, out: torch.dtype) -> Tensor:
    """`format.operand(e, dtype)` or `format.decode(e, dtype)`, then cast to `out`."""
    values: Tensor = _MODULES[type(format)].decode(format, e, dtype, operand)
    return values if out is dtype else values.to(out)


def _plain(
    format: Format, x_RK: Tensor, dtype: torch.dtype | None, operand: bool, keep: bool, measured: Tensor | None
) -> _Made:
    """(codes and scales if `keep`, values in `dtype` unless it is None, the operand's alpha); `measured` saves a pass
    where that is one.
    """
    if isinstance(format, NVFP4) and format.outer == "row":
        return nvfp4_rows.quantize(format, x_RK, dtype, operand, keep)
    module = _MODULES[type(format)]
    known = (measured,) if module is blockscaled else ()
    made: _Made = module.quantize(format, x_RK, dtype, operand, keep, *known)
    return made


def _mixed(
    format: Transformed, x_RK: Tensor, dtype: torch.dtype | None, operand: bool, keep: bool, measured: Tensor | None
) -> _Made:
    """The same behind a transform."""
    inner, t = format.inner, format.transform
    if isinstance(t, Hadamard) and isinstance(inner, NVFP4) and inner.outer == "row":
        return nvfp4_rows.quantize(inner, x_RK, dtype, operand, keep, t, format.inverse)
    if isinstance(t, Hadamard) and isinstance(inner, MX | NVFP4):
        with on(x_RK):
            return blockscaled.quantize(inner, x_RK, dtype, operand, keep, measured, t, format.inverse)
    if isinstance(t, Hadamard) and isinstance(inner, MXFP4Dialect):
        with on(x_RK):
            return dialects.quantize(inner, x_RK, dtype, operand, keep, t, format.inverse)
    y_RK = transform(format, x_RK, None)
    if isinstance(inner, HighPrecision):
        return inner.encode(y_RK) if keep else None, None if dtype is None else y_RK.to(dtype), None
    return _plain(inner, y_RK, dtype, operand, keep, measured)


def transform(
    format: Transformed, x_RK: Tensor, matrix: Tensor | None, back: bool = False, clipped: Tensor | None = None
) -> Tensor:
    """`format.transformed(x_RK, matrix)`, or back: `format.pull_back(x_RK, matrix)`, zero where it is `clipped`; in one
    pass.
    """
    assert isinstance(format.transform, Hadamard)
    dtype = x_RK.dtype if back or isinstance(format.inner, HighPrecision) else torch.float32
    with on(x_RK):
        return hadamard.mix(x_RK, format.transform, format.inverse, dtype, back=back, clipped=clipped)


def saturated(format: Format, x_RK: Tensor, matrix: Tensor | None) -> Tensor:
    """Bit-packed mask of the values that an MXFP4 dialect clips, of transformed ones if `format` is transformed."""
    inner, t, inverse = format.base, None, False
    if isinstance(format, Transformed):
        assert isinstance(format.transform, Hadamard)
        t, inverse = format.transform, format.inverse
    assert isinstance(inner, MXFP4Dialect)
    with on(x_RK):
        return dialects.saturated(inner, x_RK, t, inverse)


def rotate(format: Rotated, x_RK: Tensor, random: Random) -> Tensor:
    """x_RK rotated as `format` does before its inner encoding."""
    with on(x_RK):
        return stochastic.rotate(format, x_RK, random)


_MODULES: dict[type[Format], ModuleType] = {
    **dict.fromkeys((MX, NVFP4, NVFP4Search), blockscaled),
    **dict.fromkeys((MXFP4Dialect, NVFP4Dialect), dialects),
    **dict.fromkeys((FourOverSix, GridFlip), grids),
    **dict.fromkeys((Int4, Affine), integer),
    **dict.fromkeys((Float8, Float8Mslk), float8),
}  # those that `codec._has_kernel` knows
