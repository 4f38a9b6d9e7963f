"""Triton kernels for the codec: encode, decode, and both in one pass. Imported when a CUDA device first asks for them.

`formats/` stays the truth. Every kernel here reproduces `Format.encode`, `operand` and `decode` bit for bit, NaN, Inf, zeros and
subnormals included (`test/gpu/test_triton_exact.py`), and `why_not` says what has no kernel yet.
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
    Format,
    FourOverSix,
    HighPrecision,
    Int4,
    MXFP4Dialect,
    NVFP4Dialect,
    Random,
    Randomized,
    Rotated,
    Transformed,
)
from aoquant.ops.router import Quantized
from aoquant.transforms import Hadamard

from . import blockscaled, dialects, float8, grids, hadamard, integer, stochastic
from .launch import on


def encode(format: Format, x_RK: Tensor) -> Encoded:
    """`format.encode(x_RK)`."""
    encoded, *_ = _quantize(format, x_RK, None, True, True)
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
    """Codes, if `keep`, and what they stand for, reading x once, or twice when a scale of the whole is not `measured` yet.

    At random, codes and operand alike.
    """
    if isinstance(format, Randomized):
        assert operand and random is not None
        with on(x_RK):
            return Quantized(*stochastic.quantize(format, x_RK, dtype, random))
    encoded, values, alpha = _quantize(format, x_RK, dtype, operand, keep, measured)
    assert values is not None
    return Quantized(encoded, values, alpha)


def decode(format: Format, e: Encoded, dtype: torch.dtype, operand: bool, out: torch.dtype) -> Tensor:
    """`format.operand(e, dtype)` or `format.decode(e, dtype)`, then cast to `out`."""
    with on(e.codes):
        values: Tensor = _module(format).decode(format, e, dtype, operand)
    return values.to(out)


def _quantize(
    format: Format,
    x_RK: Tensor,
    dtype: torch.dtype | None,
    operand: bool,
    keep: bool,
    measured: Tensor | None = None,
) -> tuple[Encoded | None, Tensor | None, Tensor | None]:
    if not isinstance(format, Transformed):
        return _encoded(format, x_RK, dtype, operand, keep, measured)
    inner, t = format.inner, format.transform
    if isinstance(t, Hadamard) and isinstance(inner, MX | NVFP4):
        with on(x_RK):
            return blockscaled.quantize(inner, x_RK, dtype, operand, keep, measured, t, format.inverse)
    if isinstance(t, Hadamard) and isinstance(inner, MXFP4Dialect):
        with on(x_RK):
            return dialects.quantize(inner, x_RK, dtype, operand, keep, t, format.inverse)
    if isinstance(inner, HighPrecision):
        y_RK = transform(format, x_RK, None)
        return inner.encode(y_RK) if keep else None, None if dtype is None else y_RK.to(dtype), None
    return _encoded(inner, transform(format, x_RK, None), dtype, operand, keep, measured)


def _encoded(
    format: Format, x_RK: Tensor, dtype: torch.dtype | None, operand: bool, keep: bool, measured: Tensor | None
) -> tuple[Encoded | None, Tensor | None, Tensor | None]:
    """`_quantize` of a format without transform; `measured` saves a pass where that is one."""
    if isinstance(format, MX | NVFP4):
        return blockscaled.quantize(format, x_RK, dtype, operand, keep, measured)
    found: tuple[Encoded | None, Tensor | None, Tensor | None]
    with on(x_RK):
        found = _module(format).quantize(format, x_RK, dtype, operand, keep)
    return found


def transform(
    format: Transformed, x_RK: Tensor, matrix: Tensor | None, back: bool = False, clipped: Tensor | None = None
) -> Tensor:
    """`format.transformed(x_RK, matrix)`, or back: `format.pull_back(x_RK, matrix)`, zero where it is `clipped`; in one pass."""
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


def _module(format: Format) -> ModuleType:
    if isinstance(format, MX | NVFP4):
        return blockscaled
    if isinstance(format, MXFP4Dialect | NVFP4Dialect):
        return dialects
    if isinstance(format, FourOverSix):
        return grids
    if isinstance(format, Int4 | Affine):
        return integer
    assert isinstance(format, Float8)
    return float8
