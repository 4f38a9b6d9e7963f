"""A stack of experts that is stored transposed, (E, K, N), encoded where it lies: values (E, K, N), no codes.

The B values of a block lie across memory here, one in each of B rows of N. A program takes B rows and C columns, which
are C blocks. It reads and writes along memory, and reduces over the rows of its tile to find what the values of a block
share. No values are transposed, because a GEMM takes an operand in either order. Scales and rounding are done by
functions of the encoders of rows: blockscaled.py, integer.py and float8.py.

A format with a scale for each row of K values needs its largest magnitude first, which a pass over the stack finds.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from aoquant.formats import MX, NVFP4, Float8, Int4
from aoquant.formats.blockscaled import E4M3_FLOOR
from aoquant.formats.elements import ELEMENTS
from aoquant.formats.int4 import INT4_EPS
from aoquant.formats.scales import reciprocal

from .blockscaled_kernels import nvfp4_scale
from .element_codes import (
    ROUND,
    bits_float,
    e2m1_rounded,
    e2m1_sign,
    e2m1_value,
    e8m0_byte,
    e8m0_inverse,
    e8m0_value,
    float8_code,
    float_bits,
    least,
    most,
    through,
)
from .float8_kernels import _scale, divided
from .integer_kernels import TL_DTYPE, _fused, _int4_values, int4_scales, int4_shifted
from .launch import LAUNCHES, Launch

COLUMNS = 64  # of a tile: 128 bytes of bfloat16
A_WARP = 2048  # values
ROWS = 16  # of a tile of a format without blocks along K
PASS_ROWS, PASS_STEPS = 32, 16  # of a tile of the first pass; tiles of a program


@triton.jit
def _places(n, k, B: tl.constexpr, C: tl.constexpr):
    """Of a program's B x C values: (where they are; whether they are there)."""
    row, column = tl.program_id(1) * B + tl.arange(0, B), tl.program_id(0) * C + tl.arange(0, C)
    at = tl.program_id(2).to(tl.int64) * k * n + row.to(tl.int64)[:, None] * n + column[None, :]
    return at, (row < k)[:, None] & (column < n)[None, :]


@triton.jit
def _lines(n, C: tl.constexpr):
    """Of a program's columns: (rows of the stack (E * N, K); whether they are there)."""
    column = tl.program_id(0) * C + tl.arange(0, C)
    return tl.program_id(2) * n + column, column < n


@triton.jit
def _blocks(
    x_ptr, outer_ptr, values_ptr, n, k,
    RULE: tl.constexpr, MAX_POW2: tl.constexpr, RECIPROCAL: tl.constexpr, MANTISSA: tl.constexpr, LIMIT: tl.constexpr,
    ELEMENT: tl.constexpr, FLOOR: tl.constexpr, DECODE: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """MX, or NVFP4 under one outer scale for each expert, which RULE "" says. DECODE: the outer scale is multiplied
    in.
    """
    at, inside = _places(n, k, B, C)
    x = float_bits(tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32))
    magnitude = x & 0x7FFFFFFF
    amax = tl.max(magnitude, axis=0)
    if RULE == "":
        outer = tl.load(outer_ptr + tl.program_id(2)) + tl.zeros([C], tl.float32)
        scale, inverse = nvfp4_scale(amax, outer, tl.div_rn(tl.full([C], 1.0, tl.float32), outer), RECIPROCAL, FLOOR)
        step = scale.to(tl.float32)
        if DECODE:
            step = outer * step
    else:
        byte = e8m0_byte(amax, RULE, MAX_POW2, RECIPROCAL, MANTISSA)
        inverse, step = e8m0_inverse(byte, RULE), e8m0_value(byte)
    if ELEMENT == "e2m1":
        rounded = e2m1_rounded(bits_float(magnitude) * inverse[None, :])
        value = e2m1_value(rounded, e2m1_sign(x, magnitude))
    else:
        value = float8_code(bits_float(x) * inverse[None, :], LIMIT, ELEMENT).to(tl.float32)
    tl.store(values_ptr + at, (value * step[None, :]).to(values_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _int4(
    x_ptr, values_ptr, n, k,
    EPS: tl.constexpr, RECIPROCAL: tl.constexpr, FUSED: tl.constexpr, DTYPE: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """DTYPE: of scales and zero points."""
    at, inside = _places(n, k, B, C)
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    low, high = tl.reduce(x, 0, least), tl.reduce(x, 0, most)
    scale, zero = int4_scales(low, high, EPS, RECIPROCAL)
    shifted = int4_shifted(x - low[None, :], scale[None, :], tl.max(scale, axis=0) < 2.0**60)
    scale, zero = through(scale, DTYPE), through(zero, DTYPE)
    value = _int4_values(shifted - (ROUND + 8.0), scale[None, :], zero[None, :], FUSED, values_ptr.dtype.element_ty)
    tl.store(values_ptr + at, value, mask=inside)


@triton.jit
def _absmax(x_ptr, amax_ptr, n, k, STEPS: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    """Bits of the largest magnitude of each row of K values, (E * N,) int32, zero at first; B * STEPS of them here."""
    expert = tl.program_id(2).to(tl.int64) * k * n
    column = tl.program_id(0) * C + tl.arange(0, C)
    largest = tl.zeros([B, C], tl.int32)
    for step in range(STEPS):
        row = (tl.program_id(1) * STEPS + step) * B + tl.arange(0, B)
        at = expert + row.to(tl.int64)[:, None] * n + column[None, :]
        x = tl.load(x_ptr + at, mask=(row < k)[:, None] & (column < n)[None, :], other=0.0).to(tl.float32)
        largest = tl.maximum(largest, float_bits(x) & 0x7FFFFFFF)
    line, there = _lines(n, C)
    tl.atomic_max(amax_ptr + line, tl.max(largest, axis=0), mask=there, sem="relaxed")


@triton.jit
def _float8(
    x_ptr, amax_ptr, scale_ptr, values_ptr, n, k,
    RECIPROCAL: tl.constexpr, LIMIT: tl.constexpr, ELEMENT: tl.constexpr, DECODE: tl.constexpr, DTYPE: tl.constexpr,
    B: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """A scale for each row of K values. DTYPE: of x. DECODE: it is multiplied in."""
    at, inside = _places(n, k, B, C)
    line, there = _lines(n, C)
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    scale = _scale(tl.load(amax_ptr + line, mask=there, other=0), RECIPROCAL, DTYPE)
    tl.store(scale_ptr + line, scale, mask=there & (tl.program_id(1) == 0))
    fits = (scale > 2.0**-60) & (scale < 2.0**60)
    value = float8_code(divided(x, scale[None, :], tl.min(fits.to(tl.int32), axis=0) == 1), LIMIT, ELEMENT)
    value = value.to(tl.float32)
    if DECODE:
        value = value * scale[None, :]
    tl.store(values_ptr + at, value.to(values_ptr.dtype.element_ty), mask=inside)


def values(
    format: Any, x_EKN: Tensor, outer: Tensor | None, dtype: torch.dtype, operand: bool
) -> tuple[Tensor, Tensor | None]:
    """(values (E, K, N) in `dtype`, the operand or decoded; the operand's alpha (E * N, 1), or None for 1).

    x_EKN: contiguous. outer: (E, 1), NVFP4's outer scales.
    """
    experts, k, n = x_EKN.shape
    made, device = torch.empty_like(x_EKN, dtype=dtype), x_EKN.device
    if format.block is None:
        amax = torch.zeros(experts * n, dtype=torch.int32, device=device)
        _finder(experts, k, n)(x_EKN, amax)
        scale = torch.empty(experts * n, 1, dtype=torch.float32, device=device)
        _float8_encoder(format, experts, k, n, x_EKN.dtype, not operand)(x_EKN, amax, scale, made)
        return made, scale
    if format.element == "int4":
        _int4_encoder(format, experts, k, n, x_EKN.dtype, dtype)(x_EKN, made)
        return made, None
    _block_encoder(format, experts, k, n, not operand)(x_EKN, outer, made)
    return made, None if outer is None else outer.expand(experts, n).reshape(-1, 1)


def _tiles(experts: int, k: int, n: int, height: int) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """(the grid, arguments of every encoder)."""
    grid = triton.cdiv(n, COLUMNS), triton.cdiv(k, height), experts
    warps = max(1, height * COLUMNS // A_WARP)
    return grid, {"n": n, "k": k, "B": height, "C": COLUMNS, "num_warps": warps, "enable_fp_fusion": False}


@lru_cache(LAUNCHES)
def _block_encoder(format: MX | NVFP4, experts: int, k: int, n: int, decode: bool) -> Launch:
    grid, common = _tiles(experts, k, n, format.block)
    of = ELEMENTS[format.element]
    return Launch(
        _blocks, grid, RULE=format.rule, MAX_POW2=of.max_pow2, RECIPROCAL=reciprocal(of.largest),
        MANTISSA=of.mantissa, LIMIT=of.largest, ELEMENT=format.element, FLOOR=E4M3_FLOOR, DECODE=decode, **common,
    )  # fmt: skip


@lru_cache(LAUNCHES)
def _int4_encoder(format: Int4, experts: int, k: int, n: int, source: torch.dtype, dtype: torch.dtype) -> Launch:
    grid, common = _tiles(experts, k, n, format.group)
    scales, (low, high) = format.scale_dtype(source), format.limits
    return Launch(
        _int4, grid, EPS=INT4_EPS, RECIPROCAL=reciprocal(float(high - low)), FUSED=_fused(format, scales, dtype),
        DTYPE=TL_DTYPE[scales], **common,
    )  # fmt: skip


@lru_cache(LAUNCHES)
def _finder(experts: int, k: int, n: int) -> Launch:
    grid, common = _tiles(experts, k, n, PASS_ROWS)
    return Launch(_absmax, (grid[0], triton.cdiv(grid[1], PASS_STEPS), experts), STEPS=PASS_STEPS, **common)


@lru_cache(LAUNCHES)
def _float8_encoder(format: Float8, experts: int, k: int, n: int, source: torch.dtype, decode: bool) -> Launch:
    grid, common = _tiles(experts, k, n, ROWS)
    limit = ELEMENTS[format.element].largest
    return Launch(
        _float8, grid, RECIPROCAL=reciprocal(limit), LIMIT=limit, ELEMENT=format.element, DECODE=decode,
        DTYPE=TL_DTYPE[source], **common,
    )  # fmt: skip
