"""Triton kernels for the codec: encode, decode, and both in one pass. Imported when a CUDA device first asks for them.

`formats/` stays the truth. Every kernel here reproduces `Format.encode`, `operand` and `decode` bit for bit, NaN, Inf, zeros and
subnormals included (`test/gpu/test_triton_exact.py`), and `why_not` says what has no kernel yet.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from aoquant.formats import MX, NVFP4, Affine, Encoded, Float8, Format, Int4, Random, Randomized
from aoquant.ops.router import Quantized

from . import blockscaled, float8, integer, stochastic


def encode(format: Format, x_RK: Tensor) -> Encoded:
    """`format.encode(x_RK)`."""
    encoded, *_ = _quantize(format, x_RK, None, True, True)
    assert encoded is not None
    return encoded


def quantize(
    format: Format, x_RK: Tensor, dtype: torch.dtype, operand: bool, keep: bool, random: Random | None = None
) -> Quantized:
    """Codes, if `keep`, and what they stand for, reading x once; at random, codes and operand alike."""
    if isinstance(format, Randomized):
        assert operand and random is not None
        return Quantized(*stochastic.quantize(format, x_RK, dtype, random))
    encoded, values, alpha = _quantize(format, x_RK, dtype, operand, keep)
    assert values is not None
    return Quantized(encoded, values, alpha)


def decode(format: Format, e: Encoded, dtype: torch.dtype, operand: bool, out: torch.dtype) -> Tensor:
    """`format.operand(e, dtype)` or `format.decode(e, dtype)`, then cast to `out`."""
    values: Tensor = _module(format).decode(format, e, dtype, operand)
    return values.to(out)


def _quantize(
    format: Format, x_RK: Tensor, dtype: torch.dtype | None, operand: bool, keep: bool
) -> tuple[Encoded | None, Tensor | None, Tensor | None]:
    return _module(format.base).quantize(format.base, format.transformed(x_RK), dtype, operand, keep)


def _module(format: Format) -> ModuleType:
    if isinstance(format, MX | NVFP4):
        return blockscaled
    if isinstance(format, Int4 | Affine):
        return integer
    assert isinstance(format, Float8)
    return float8
