"""float8 with a float32 scale per row, per tensor or per block. One pass makes the codes, and the values that backward
multiplies.

A program has a row: the whole of it or, of a longer one and where many are long, a piece at a time (row_width.py).
Blocks of 1 x 128 are a stream of rows of 128; a block of 128 x 128 is one program's.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from aoquant.formats import Encoded, Float8, Operand
from aoquant.formats.elements import ELEMENTS, FLOAT8
from aoquant.formats.scales import reciprocal

from ..quantized import Side
from .amax_kernels import PARTIALS, absmax_partials
from .element_codes import bits_float, float8_code, float_bits, most, quotient, through
from .launch import LAUNCHES, Launch
from .row_width import row_width

NO_FUSION = {"enable_fp_fusion": False}
TILE = 4096
LONGEST = 16384  # values of a row that a program keeps in registers
TL_DTYPE = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def _scale(amax_bits, RECIPROCAL: tl.constexpr, DTYPE: tl.constexpr):
    """absmax / largest, in x's dtype."""
    scale = float_bits(through(bits_float(amax_bits) * RECIPROCAL, DTYPE))
    # LLVM would see that it came from bfloat16, and multiply in float16 where the result is float16: it compares
    # precision, not range
    opaque = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [scale], dtype=tl.int32, is_pure=True, pack=1)
    return bits_float(opaque)


@triton.jit
def _floored_scale(amax_bits, LIMIT: tl.constexpr, FLOOR: tl.constexpr):
    """MSLK's: max(absmax, floor) / largest, divided in float32."""
    amax = most(bits_float(amax_bits), FLOOR)
    return tl.div_rn(amax, tl.zeros_like(amax) + LIMIT)


@triton.jit
def _code(x, scale, LIMIT: tl.constexpr, ELEMENT: tl.constexpr):
    """x / scale, saturated, as float8; 0 where the scale is 0."""
    if (scale > 2.0**-60) & (scale < 2.0**60):
        y = quotient(x, scale, tl.div_rn(tl.full([], 1.0, tl.float32), scale))
    else:
        y = tl.div_rn(x, tl.where(scale == 0, 1.0, scale) + tl.zeros_like(x))
        y = tl.where(scale == 0, 0.0, y)
    return float8_code(y, LIMIT, ELEMENT)


@triton.jit
def divided(x, s, fits):
    """x / s, 0 where s is 0; s: of rows, (R, 1), or of columns, (1, C); fits: whether all of s is in [2^-60, 2^60]."""
    if fits:
        y = quotient(x, s, tl.div_rn(tl.full(s.shape, 1.0, tl.float32), s))
    else:
        y = tl.div_rn(x, tl.where(s == 0, 1.0, s) + tl.zeros_like(x))
        y = tl.where(s == 0, 0.0, y)
    return y


@triton.jit
def _encode_row(
    x_ptr, codes_ptr, scale_ptr, values_ptr, k,
    RECIPROCAL: tl.constexpr, LIMIT: tl.constexpr, ELEMENT: tl.constexpr, CODES: tl.constexpr, VALUES: tl.constexpr,
    DTYPE: tl.constexpr, FLOOR: tl.constexpr, B: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """Run one program for each row. VALUES: "", "operand" or "decode". FLOOR: of MSLK's absmax, 0 for PyTorch's
    scales.
    """
    start = tl.cast(tl.program_id(0), tl.int64) * k
    column = tl.arange(0, B)
    x = tl.load(x_ptr + start + column, mask=column < k, other=0.0).to(tl.float32)
    largest = float_bits(x) & 0x7FFFFFFF
    if not ONCE:
        for first in range(B, k, B):
            more = tl.load(x_ptr + start + first + column, mask=first + column < k, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, float_bits(more) & 0x7FFFFFFF)
    amax_bits = tl.max(largest, axis=0)
    scale = _scale(amax_bits, RECIPROCAL, DTYPE) if FLOOR == 0 else _floored_scale(amax_bits, LIMIT, FLOOR)
    tl.store(scale_ptr + tl.program_id(0), scale)
    for first in range(0, k, B):
        at = start + first + column
        if not ONCE:
            x = tl.load(x_ptr + at, mask=first + column < k, other=0.0).to(tl.float32)
        code = _code(x, scale, LIMIT, ELEMENT)
        if CODES:
            tl.store(codes_ptr + at, code.to(tl.uint8, bitcast=True), mask=first + column < k)
        if VALUES != "":
            value = code.to(tl.float32)
            if VALUES == "decode":
                value = value * scale
            tl.store(values_ptr + at, value.to(values_ptr.dtype.element_ty), mask=first + column < k)


@triton.jit
def _encode_tensor(
    x_ptr, partial_ptr, codes_ptr, scale_ptr, values_ptr, n,
    RECIPROCAL: tl.constexpr, LIMIT: tl.constexpr, ELEMENT: tl.constexpr, CODES: tl.constexpr, VALUES: tl.constexpr,
    DTYPE: tl.constexpr, B: tl.constexpr, N_PARTIALS: tl.constexpr,
):  # fmt: skip
    scale = _scale(tl.max(tl.load(partial_ptr + tl.arange(0, N_PARTIALS)), axis=0), RECIPROCAL, DTYPE)
    if tl.program_id(0) == 0:
        tl.store(scale_ptr, scale)
    # backwards: what the first pass read last is what the L2 cache still holds
    at = tl.cast(tl.num_programs(0) - 1 - tl.program_id(0), tl.int64) * B + tl.arange(0, B)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    code = _code(x, scale, LIMIT, ELEMENT)
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
    RECIPROCAL: tl.constexpr, LIMIT: tl.constexpr, ELEMENT: tl.constexpr, CODES: tl.constexpr, VALUES: tl.constexpr,
    DTYPE: tl.constexpr, TALL: tl.constexpr, R: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """R x B values a program; TALL: they have one scale, otherwise each row has one."""
    line = tl.arange(0, R)
    row = tl.program_id(0) * R + line
    at = tl.cast(row, tl.int64)[:, None] * k + (tl.program_id(1) * B + tl.arange(0, B))[None, :]
    inside = (row < rows)[:, None]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(float_bits(x) & 0x7FFFFFFF, axis=1)
    if TALL:
        largest = tl.max(largest, axis=0) + tl.zeros([R], tl.int32)
    scale = _scale(largest, RECIPROCAL, DTYPE)
    index = (tl.program_id(0) if TALL else row) * tl.num_programs(1) + tl.program_id(1)
    tl.store(scale_ptr + index + tl.zeros_like(line), scale, mask=(line == 0) if TALL else (row < rows))
    s = scale[:, None]
    fits = (scale > 2.0**-60) & (scale < 2.0**60)
    code = float8_code(divided(x, s, tl.min(fits.to(tl.int32), axis=0) == 1), LIMIT, ELEMENT)
    if CODES:
        tl.store(codes_ptr + at, code.to(tl.uint8, bitcast=True), mask=inside)
    if VALUES != "":
        tl.store(values_ptr + at, (code.to(tl.float32) * s).to(values_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _decode(
    codes_ptr, scale_ptr, values_ptr, n, k, SCALE_STRIDE,
    ELEMENT: tl.constexpr, SCALED: tl.constexpr, TALL: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """TALL: rows and columns of a block that has one scale; 0 for a scale for every k values, or one in all."""
    at = tl.cast(tl.program_id(0), tl.int64) * B + tl.arange(0, B)
    code = tl.load(codes_ptr + at, mask=at < n, other=0)
    code = code.to(tl.float8e4nv, bitcast=True) if ELEMENT == "e4m3" else code.to(tl.float8e5, bitcast=True)
    value = code.to(tl.float32)
    if SCALED:
        index = (at // k) * SCALE_STRIDE
        if TALL > 0:
            index = (at // k) // TALL * (k // TALL) + at % k // TALL
        value = value * tl.load(scale_ptr + index, mask=at < n, other=0.0)
    tl.store(values_ptr + at, value.to(values_ptr.dtype.element_ty), mask=at < n)


@lru_cache(LAUNCHES)
def _encoder(format: Float8, rows: int, k: int, source: torch.dtype, codes: bool, values: str) -> Launch:
    limit = ELEMENTS[format.element].largest
    constants = {
        "RECIPROCAL": reciprocal(limit), "LIMIT": limit, "ELEMENT": format.element, "CODES": codes, "VALUES": values,
        "DTYPE": TL_DTYPE[source], **NO_FUSION,
    }  # fmt: skip
    if format.per == "row":
        width = row_width(rows, k, LONGEST)
        warps = min(16, max(1, width // 512))
        return Launch(
            _encode_row, (rows,), k=k, FLOOR=format.row_floor, B=width, ONCE=k <= width, num_warps=warps, **constants
        )
    if format.per == "tensor":
        return Launch(
            _encode_tensor, (triton.cdiv(rows * k, TILE),), n=rows * k, B=TILE, N_PARTIALS=PARTIALS, **constants
        )
    tall, width = format.rows > 1, format.cols
    if not tall:
        rows, k = rows * k // width, width
    height, warps = (format.rows, 8) if tall else (1024 // width, 1)
    grid = triton.cdiv(rows, height), k // width
    return Launch(_encode_blocks, grid, rows=rows, k=k, TALL=tall, R=height, B=width, num_warps=warps, **constants)


def encode(
    format: Float8,
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
    shape = {"row": (rows, 1), "tensor": (1, 1)}.get(format.per) or (triton.cdiv(rows, format.rows), k // format.cols)
    codes = torch.empty(rows, k, dtype=torch.uint8, device=device) if keep else None
    scale = torch.empty(shape, dtype=torch.float32, device=device)
    values = None if dtype is None else torch.empty(rows, k, dtype=dtype, device=device)
    made = "" if dtype is None else "operand" if operand else "decode"
    launch = _encoder(format, rows, k, x_RK.dtype, keep, made)
    if format.per == "tensor":
        launch(x_RK, absmax_partials(x_RK), codes, scale, values)
    else:
        launch(x_RK, codes, scale, values)
    encoded = None if codes is None else Encoded(codes.view(FLOAT8[format.element]), scale, None, None, k)
    return Side(encoded, values, None if format.block else scale)


@lru_cache(LAUNCHES)
def _decoder(format: Float8, rows: int, k: int, scales: int, scaled: bool) -> Launch:
    tall = format.rows if format.rows > 1 else 0
    return Launch(
        _decode, (triton.cdiv(rows * k, TILE),),
        n=rows * k, k=format.cols if format.block and not tall else k, SCALE_STRIDE=int(scales > 1), ELEMENT=format.element,
        SCALED=scaled, TALL=tall, B=TILE, **NO_FUSION,
    )  # fmt: skip


def decode(format: Float8, e: Encoded, dtype: torch.dtype, operand: bool) -> Tensor:
    """(R, K) values in `dtype`: the operand, or decoded."""
    assert e.scale is not None
    rows = e.codes.shape[0]
    values = torch.empty(rows, e.k, dtype=dtype, device=e.codes.device)
    launch = _decoder(format, rows, e.k, e.scale.numel(), not operand or format.block is not None)
    launch(e.codes.contiguous().view(torch.uint8), e.scale.contiguous(), values)
    return values
