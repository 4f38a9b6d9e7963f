"""float8 with a float32 scale per row, per tensor or per block. One pass makes the codes, and the values that backward
multiplies.

A program has a row: the whole of it or, of a longer one and where many are long, a piece at a time (row_width.py).
Blocks of 1 x 128 are a stream of rows of 128; a block of 128 x 128 is one program's. One scale for the tensor needs its
absmax first: `absmax_partials` leaves partial maxima, and every program of the encoder takes their maximum.

TransformerEngine multiplies values by a factor, and stores its reciprocal (`formats/te_float8.py`). TE says so: "" for
the scales of `formats/float8.py`, "pow2" for a factor that is rounded down to a power of two, or "exact".
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from aoquant.formats import Encoded, Float8, Operand, TEFloat8
from aoquant.formats.elements import ELEMENTS, FLOAT8, FLOAT32_MAX
from aoquant.formats.scales import reciprocal

from ..quantized import Ask, Quantized, Side
from .amax_kernels import PARTIALS, absmax_partials
from .element_codes import (
    INF_BITS,
    NAN_BITS,
    bits_float,
    float8_code,
    float_bits,
    least,
    most,
    quotient,
    row_and_column,
    through,
)
from .launch import LAUNCHES, Launch
from .row_width import row_width

NO_FUSION = {"enable_fp_fusion": False}
TILE = 4096
LONGEST = 16384  # values of a row that a program keeps in registers
SQUARE = 128  # rows and columns of a tile that is written both ways
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
def _factor(amax_bits, LIMIT: tl.constexpr, LARGEST: tl.constexpr, TE: tl.constexpr):
    """Return what TransformerEngine multiplies values by, from the bits of their absmax; 1 for 0, Inf and NaN."""
    amax = bits_float(amax_bits)
    factor = least(tl.div_rn(tl.zeros_like(amax) + LIMIT, amax), LARGEST)
    if TE == "pow2":
        factor = bits_float(float_bits(factor) & 0x7F800000)
    return tl.where((amax_bits == 0) | (amax_bits >= INF_BITS), 1.0, factor)


@triton.jit
def _times_code(x, factor, LIMIT: tl.constexpr, ELEMENT: tl.constexpr):
    """x * factor, saturated, as float8; NaN for an infinite x."""
    x = bits_float(tl.where((float_bits(x) & 0x7FFFFFFF) == INF_BITS, NAN_BITS, float_bits(x)))
    return float8_code(x * factor, LIMIT, ELEMENT)


@triton.jit
def _scale_and_factor(
    amax_bits, RECIPROCAL: tl.constexpr, LIMIT: tl.constexpr, LARGEST: tl.constexpr, TE: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """(scales that are stored; TransformerEngine's factors, or the scales) from the bits of absolute maxima."""
    if TE == "":
        scale = _scale(amax_bits, RECIPROCAL, DTYPE)
        return scale, scale
    else:
        factor = _factor(amax_bits, LIMIT, LARGEST, TE)
        return tl.div_rn(tl.full(factor.shape, 1.0, tl.float32), factor), factor


@triton.jit
def _encode_row(
    x_ptr, codes_ptr, scale_ptr, values_ptr, k,
    RECIPROCAL: tl.constexpr, LIMIT: tl.constexpr, ELEMENT: tl.constexpr, CODES: tl.constexpr, VALUES: tl.constexpr,
    DTYPE: tl.constexpr, FLOOR: tl.constexpr, B: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """Encode one row a program. VALUES: "", "operand" or "decode". FLOOR: of MSLK's absmax, 0 for PyTorch's scales."""
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
    RECIPROCAL: tl.constexpr, LIMIT: tl.constexpr, LARGEST: tl.constexpr, TE: tl.constexpr, ELEMENT: tl.constexpr,
    CODES: tl.constexpr, VALUES: tl.constexpr, DTYPE: tl.constexpr, B: tl.constexpr, N_PARTIALS: tl.constexpr,
):  # fmt: skip
    largest = tl.max(tl.load(partial_ptr + tl.arange(0, N_PARTIALS)), axis=0)
    scale, factor = _scale_and_factor(largest, RECIPROCAL, LIMIT, LARGEST, TE, DTYPE)
    if tl.program_id(0) == 0:
        tl.store(scale_ptr, scale)
    # backwards: what the first pass read last is what the L2 cache still holds
    at = tl.cast(tl.num_programs(0) - 1 - tl.program_id(0), tl.int64) * B + tl.arange(0, B)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    code = _code(x, scale, LIMIT, ELEMENT) if TE == "" else _times_code(x, factor, LIMIT, ELEMENT)
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
    RECIPROCAL: tl.constexpr, LIMIT: tl.constexpr, LARGEST: tl.constexpr, TE: tl.constexpr, ELEMENT: tl.constexpr,
    CODES: tl.constexpr, VALUES: tl.constexpr, DTYPE: tl.constexpr, TALL: tl.constexpr, R: tl.constexpr, B: tl.constexpr,
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
    scale, factor = _scale_and_factor(largest, RECIPROCAL, LIMIT, LARGEST, TE, DTYPE)
    index = (tl.program_id(0) if TALL else row) * tl.num_programs(1) + tl.program_id(1)
    tl.store(scale_ptr + index + tl.zeros_like(line), scale, mask=(line == 0) if TALL else (row < rows))
    if TE == "":
        s, fits = scale[:, None], (scale > 2.0**-60) & (scale < 2.0**60)
        code = float8_code(divided(x, s, tl.min(fits.to(tl.int32), axis=0) == 1), LIMIT, ELEMENT)
    else:
        code = _times_code(x, factor[:, None], LIMIT, ELEMENT)
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
    """A T x T tile by TransformerEngine's rule, under one scale for the tensor: its codes where they lie in x, and
    where they lie in x^T, whose rows are `padded` with zeros.
    """
    factor = _factor(tl.max(tl.load(partial_ptr + tl.arange(0, N_PARTIALS)), axis=0), LIMIT, LARGEST, "exact")
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale_ptr, tl.div_rn(tl.full([], 1.0, tl.float32), factor))
    row = (tl.program_id(0) * T + tl.arange(0, T)).to(tl.int64)
    column = (tl.program_id(1) * T + tl.arange(0, T)).to(tl.int64)
    at, inside = row[:, None] * k + column[None, :], (row < rows)[:, None] & (column < k)[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    code = _times_code(x, factor, LIMIT, ELEMENT).to(tl.uint8, bitcast=True)
    tl.store(codes_ptr + at, code, mask=inside)
    inside = (column < k)[:, None] & (row < padded)[None, :]
    tl.store(columns_ptr + column[:, None] * padded + row[None, :], tl.trans(code), mask=inside)


@triton.jit
def _decode(
    codes_ptr, scale_ptr, values_ptr, n, K: tl.constexpr, SCALES: tl.constexpr, ELEMENT: tl.constexpr, TALL: tl.constexpr,
    TOGETHER: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Decode B values. SCALES: "" for none, "one" for all, "some" for one for every K values. TALL: rows and columns of
    a block that has one scale; 0 for none. TOGETHER: values in a row that share a scale, so that it is loaded once.
    """
    first, i = tl.cast(tl.program_id(0), tl.int64) * B, tl.arange(0, B // TOGETHER)
    at = first + (i[:, None] * TOGETHER + tl.arange(0, TOGETHER)[None, :])
    code = tl.load(codes_ptr + at, mask=at < n, other=0)
    code = code.to(tl.float8e4nv, bitcast=True) if ELEMENT == "e4m3" else code.to(tl.float8e5, bitcast=True)
    value = code.to(tl.float32)
    if SCALES == "one":
        value = value * tl.load(scale_ptr)
    elif SCALES == "some":
        index, column = row_and_column(first // TOGETHER, i, K // TOGETHER)
        if TALL > 0:
            index = index // TALL * (K // TALL) + column // (TALL // TOGETHER)
        value = value * tl.load(scale_ptr + index, mask=first + i * TOGETHER < n, other=0.0)[:, None]
    tl.store(values_ptr + at, value.to(values_ptr.dtype.element_ty), mask=at < n)


@lru_cache(LAUNCHES)
def _encoder(format: Float8, rows: int, k: int, source: torch.dtype, codes: bool, values: str) -> Launch:
    limit = ELEMENTS[format.element].largest
    constants = {
        "RECIPROCAL": reciprocal(limit), "LIMIT": limit, "ELEMENT": format.element, "CODES": codes, "VALUES": values,
        "DTYPE": TL_DTYPE[source], **NO_FUSION,
    }  # fmt: skip
    if format.per != "row":
        te = isinstance(format, TEFloat8)
        constants |= {
            "LARGEST": FLOAT32_MAX,
            "TE": "" if not te else "pow2" if format.block and format.pow2 else "exact",
        }
    else:
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


def encode(format: Float8, x_RK: Tensor, ask: Ask, mix: Operand | None) -> Side:
    """Make what `ask` asks for of x_RK. mix: not used."""
    x_RK = x_RK.contiguous()
    (rows, k), device = x_RK.shape, x_RK.device
    shape = {"row": (rows, 1), "tensor": (1, 1)}.get(format.per) or (triton.cdiv(rows, format.rows), k // format.cols)
    codes = torch.empty(rows, k, dtype=torch.uint8, device=device) if ask.codes else None
    scale = torch.empty(shape, dtype=torch.float32, device=device)
    values = None if ask.values is None else torch.empty(rows, k, dtype=ask.values, device=device)
    launch = _encoder(format, rows, k, x_RK.dtype, ask.codes, ask.form)
    if format.per == "tensor":
        launch(x_RK, absmax_partials(x_RK), codes, scale, values)
    else:
        launch(x_RK, codes, scale, values)
    encoded = None if codes is None else Encoded(codes.view(FLOAT8[format.element]), scale, None, None, k)
    return Side(encoded, values, None if format.block else scale)


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
def _decoder(format: Float8, rows: int, k: int, scales: int, scaled: bool) -> Launch:
    tall = format.rows if format.rows > 1 else 0
    width = (
        format.cols if format.block and not tall else k
    )  # of rows of values; of one scale each where no block is tall
    return Launch(
        _decode, (triton.cdiv(rows * k, TILE),),
        n=rows * k, K=width, SCALES="" if not scaled else "some" if scales > 1 else "one", ELEMENT=format.element,
        TALL=tall, TOGETHER=gcd(width, tall, 16), B=TILE, **NO_FUSION,
    )  # fmt: skip


def decode(format: Float8, e: Encoded, dtype: torch.dtype, operand: bool) -> Tensor:
    """(R, K) values in `dtype`: the operand, or decoded."""
    rows = e.codes.shape[0]
    values = torch.empty(rows, e.k, dtype=dtype, device=e.codes.device)
    launch = _decoder(format, rows, e.k, e.scales.numel(), not operand or format.block is not None)
    launch(e.codes.contiguous().view(torch.uint8), e.scales.contiguous(), values)
    return values
