"""TransformerEngine's float8 in one pass, as `formats/te_float8.py` defines it: values are multiplied by a factor,
whose reciprocal is stored.

One scale for the tensor needs its absmax first: `amax.absmax_partials` leaves partial maxima, and every program of the
encoder takes their maximum, walking backwards, because what the first pass read last is what the L2 cache still holds.
Blocks of 1 x 128 are a stream of rows of 128; a block of 128 x 128 is one program's. Decoding is float8.py's.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from aoquant.formats import Encoded, Operand, TEFloat8
from aoquant.formats.elements import ELEMENTS, FLOAT8, FLOAT32_MAX

from ..quantized import Quantized, Side
from .amax_kernels import PARTIALS, absmax_partials
from .element_codes import INF_BITS, NAN_BITS, bits_float, float_bits, least, most
from .float8_kernels import NO_FUSION, TILE, decode
from .launch import LAUNCHES, Launch

__all__ = ["decode", "encode", "sides"]
WIDTH = 128  # columns of a block
SQUARE = 128  # rows and columns of a tile that is written both ways


@triton.jit
def _factor(amax_bits, LIMIT: tl.constexpr, LARGEST: tl.constexpr, POW2: tl.constexpr):
    """Return what values are multiplied by, from the bits of their absmax; 1 for 0, Inf and NaN."""
    amax = bits_float(amax_bits)
    factor = least(tl.div_rn(tl.zeros_like(amax) + LIMIT, amax), LARGEST)
    if POW2:
        factor = bits_float(float_bits(factor) & 0x7F800000)
    return tl.where((amax_bits == 0) | (amax_bits >= INF_BITS), 1.0, factor)


@triton.jit
def _code(x, factor, LIMIT: tl.constexpr, ELEMENT: tl.constexpr):
    """x * factor, saturated, as float8; NaN for an infinite x."""
    x = bits_float(tl.where((float_bits(x) & 0x7FFFFFFF) == INF_BITS, NAN_BITS, float_bits(x)))
    y = least(most(x * factor, -LIMIT), LIMIT)
    return y.to(tl.float8e4nv) if ELEMENT == "e4m3" else y.to(tl.float8e5)


@triton.jit
def _encode_tensor(
    x_ptr, partial_ptr, codes_ptr, scale_ptr, values_ptr, n,
    LIMIT: tl.constexpr, LARGEST: tl.constexpr, POW2: tl.constexpr, ELEMENT: tl.constexpr, CODES: tl.constexpr,
    VALUES: tl.constexpr, B: tl.constexpr, N_PARTIALS: tl.constexpr,
):  # fmt: skip
    """VALUES: "", "operand" or "decode"."""
    factor = _factor(tl.max(tl.load(partial_ptr + tl.arange(0, N_PARTIALS)), axis=0), LIMIT, LARGEST, POW2)
    scale = tl.div_rn(tl.full([], 1.0, tl.float32), factor)
    if tl.program_id(0) == 0:
        tl.store(scale_ptr, scale)
    at = tl.cast(tl.num_programs(0) - 1 - tl.program_id(0), tl.int64) * B + tl.arange(0, B)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    code = _code(x, factor, LIMIT, ELEMENT)
    if CODES:
        tl.store(codes_ptr + at, code.to(tl.uint8, bitcast=True), mask=at < n)
    if VALUES != "":
        value = code.to(tl.float32)
        if VALUES == "decode":
            value = value * scale
        tl.store(values_ptr + at, value.to(values_ptr.dtype.element_ty), mask=at < n)


@triton.jit
def _encode_blocks(
    x_ptr, codes_ptr, scale_ptr, values_ptr, rows, k,
    LIMIT: tl.constexpr, LARGEST: tl.constexpr, POW2: tl.constexpr, ELEMENT: tl.constexpr, CODES: tl.constexpr,
    VALUES: tl.constexpr, TALL: tl.constexpr, R: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """R x B values a program; TALL: they have one scale, otherwise each row has one. Values are decoded ones."""
    line = tl.arange(0, R)
    row = tl.program_id(0) * R + line
    at = tl.cast(row, tl.int64)[:, None] * k + (tl.program_id(1) * B + tl.arange(0, B))[None, :]
    inside = (row < rows)[:, None]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(float_bits(x) & 0x7FFFFFFF, axis=1)
    if TALL:
        largest = tl.max(largest, axis=0) + tl.zeros([R], tl.int32)
    factor = _factor(largest, LIMIT, LARGEST, POW2)
    scale = tl.div_rn(tl.full([R], 1.0, tl.float32), factor)
    index = (tl.program_id(0) if TALL else row) * tl.num_programs(1) + tl.program_id(1)
    tl.store(scale_ptr + index + tl.zeros_like(line), scale, mask=(line == 0) if TALL else (row < rows))
    code = _code(x, factor[:, None], LIMIT, ELEMENT)
    if CODES:
        tl.store(codes_ptr + at, code.to(tl.uint8, bitcast=True), mask=inside)
    if VALUES != "":
        value = code.to(tl.float32) * scale[:, None]
        tl.store(values_ptr + at, value.to(values_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _encode_sides(
    x_ptr, partial_ptr, codes_ptr, scale_ptr, columns_ptr, rows, k, padded,
    LIMIT: tl.constexpr, LARGEST: tl.constexpr, ELEMENT: tl.constexpr, T: tl.constexpr, N_PARTIALS: tl.constexpr,
):  # fmt: skip
    """A T x T tile: its codes where they lie in x, and where they lie in x^T, whose rows are `padded` with zeros."""
    factor = _factor(tl.max(tl.load(partial_ptr + tl.arange(0, N_PARTIALS)), axis=0), LIMIT, LARGEST, False)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale_ptr, tl.div_rn(tl.full([], 1.0, tl.float32), factor))
    row = (tl.program_id(0) * T + tl.arange(0, T)).to(tl.int64)
    column = (tl.program_id(1) * T + tl.arange(0, T)).to(tl.int64)
    at, inside = row[:, None] * k + column[None, :], (row < rows)[:, None] & (column < k)[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    code = _code(x, factor, LIMIT, ELEMENT).to(tl.uint8, bitcast=True)
    tl.store(codes_ptr + at, code, mask=inside)
    inside = (column < k)[:, None] & (row < padded)[None, :]
    tl.store(columns_ptr + column[:, None] * padded + row[None, :], tl.trans(code), mask=inside)


@lru_cache(LAUNCHES)
def _sides(format: TEFloat8, rows: int, k: int, padded: int) -> Launch:
    return Launch(
        _encode_sides, (triton.cdiv(padded, SQUARE), triton.cdiv(k, SQUARE)), rows=rows, k=k, padded=padded,
        LIMIT=ELEMENTS[format.element].largest, LARGEST=FLOAT32_MAX, ELEMENT=format.element, T=SQUARE, N_PARTIALS=PARTIALS,
        num_warps=8, **NO_FUSION,
    )  # fmt: skip


def sides(format: TEFloat8, x_RK: Tensor, padded: int) -> Quantized:
    """Codes and scale of x_RK under one scale for the tensor, and of x^T (K, padded), reading x twice: for its absmax,
    and once for both.
    """
    x_RK = x_RK.contiguous()
    (rows, k), device = x_RK.shape, x_RK.device
    codes = torch.empty(rows, k, dtype=torch.uint8, device=device)
    columns = torch.empty(k, padded, dtype=torch.uint8, device=device)
    scale = torch.empty(1, 1, dtype=torch.float32, device=device)
    _sides(format, rows, k, padded)(x_RK, absmax_partials(x_RK), codes, scale, columns)
    native = FLOAT8[format.element]
    of_x, of_y = (Encoded(c.view(native), scale, None, None, n) for c, n in ((codes, k), (columns, padded)))
    return Quantized(Side(of_x), Side(of_y))


@lru_cache(LAUNCHES)
def _encoder(format: TEFloat8, rows: int, k: int, codes: bool, values: str) -> Launch:
    constants = {
        "LIMIT": ELEMENTS[format.element].largest, "LARGEST": FLOAT32_MAX, "POW2": format.per == "block" and format.pow2,
        "ELEMENT": format.element, "CODES": codes, "VALUES": values, **NO_FUSION,
    }  # fmt: skip
    if format.per == "tensor":
        programs = (triton.cdiv(rows * k, TILE),)
        return Launch(_encode_tensor, programs, n=rows * k, B=TILE, N_PARTIALS=PARTIALS, **constants)
    tall = format.rows > 1
    if not tall:
        rows, k = rows * k // WIDTH, WIDTH
    height, warps = (format.rows, 8) if tall else (1024 // WIDTH, 1)
    grid = triton.cdiv(rows, height), k // WIDTH
    return Launch(_encode_blocks, grid, rows=rows, k=k, TALL=tall, R=height, B=WIDTH, num_warps=warps, **constants)


def encode(
    format: TEFloat8,
    x_RK: Tensor,
    dtype: torch.dtype | None,
    operand: bool,
    keep: bool,
    measured: Tensor | None,
    mix: Operand | None,
) -> Side:
    """Codes and scales of x_RK if `keep`, values in `dtype` unless it is None: `operand` or decoded.

    measured, mix: not used.
    """
    x_RK = x_RK.contiguous()
    (rows, k), device = x_RK.shape, x_RK.device
    shape = (1, 1) if format.per == "tensor" else (triton.cdiv(rows, format.rows), k // WIDTH)
    codes = torch.empty(rows, k, dtype=torch.uint8, device=device) if keep else None
    scale = torch.empty(shape, dtype=torch.float32, device=device)
    values = None if dtype is None else torch.empty(rows, k, dtype=dtype, device=device)
    launch = _encoder(format, rows, k, keep, "" if dtype is None else "operand" if operand else "decode")
    if format.per == "tensor":
        launch(x_RK, absmax_partials(x_RK), codes, scale, values)
    else:
        launch(x_RK, codes, scale, values)
    encoded = None if codes is None else Encoded(codes.view(FLOAT8[format.element]), scale, None, None, k)
    return Side(encoded, values, None if format.block else scale)
