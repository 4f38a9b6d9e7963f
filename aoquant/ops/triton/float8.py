"""float8 with a float32 scale per row or per tensor: codes in one pass, and the values that backward multiplies.

A row that fits a program's registers is read once; a longer one is read twice, the second time from the L2 cache.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from aoquant.formats import Encoded, Float8
from aoquant.formats.elements import ELEMENTS, FLOAT8
from aoquant.formats.scales import reciprocal

from .amax import PARTIALS, absmax_partials
from .elements import bits_float, float_bits, least, most, quotient, through
from .launch import PLANS, Launch

NO_FUSION = {"enable_fp_fusion": False}
TILE = 4096
LONGEST = 16384  # values of a row that a program keeps in registers
TL_DTYPE = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def _scale(amax_bits, RECIPROCAL: tl.constexpr, DTYPE: tl.constexpr):
    """absmax / largest, in x's dtype."""
    scale = float_bits(through(bits_float(amax_bits) * RECIPROCAL, DTYPE))
    # LLVM would see that it came from bfloat16, and multiply in float16 where the result is float16: it compares precision, not range
    opaque = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [scale], dtype=tl.int32, is_pure=True, pack=1)
    return bits_float(opaque)


@triton.jit
def _code(x, scale, LIMIT: tl.constexpr, ELEMENT: tl.constexpr):
    """x / scale, saturated, as float8; 0 where the scale is 0."""
    if (scale > 2.0**-60) & (scale < 2.0**60):
        y = quotient(x, scale, tl.div_rn(tl.full([], 1.0, tl.float32), scale))
    else:
        y = tl.div_rn(x, tl.where(scale == 0, 1.0, scale) + tl.zeros_like(x))
        y = tl.where(scale == 0, 0.0, y)
    y = least(most(y, -LIMIT), LIMIT)
    return y.to(tl.float8e4nv) if ELEMENT == "e4m3" else y.to(tl.float8e5)


@triton.jit
def _encode_row(
    x_ptr, codes_ptr, scale_ptr, values_ptr, k,
    RECIPROCAL: tl.constexpr, LIMIT: tl.constexpr, ELEMENT: tl.constexpr, CODES: tl.constexpr, VALUES: tl.constexpr,
    DTYPE: tl.constexpr, B: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """One program a row. VALUES: "", "operand" or "decode"."""
    start = tl.cast(tl.program_id(0), tl.int64) * k
    column = tl.arange(0, B)
    x = tl.load(x_ptr + start + column, mask=column < k, other=0.0).to(tl.float32)
    largest = float_bits(x) & 0x7FFFFFFF
    if not ONCE:
        for first in range(B, k, B):
            more = tl.load(x_ptr + start + first + column, mask=first + column < k, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, float_bits(more) & 0x7FFFFFFF)
    scale = _scale(tl.max(largest, axis=0), RECIPROCAL, DTYPE)
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
def _decode(
    codes_ptr, scale_ptr, values_ptr, n, k, SCALE_STRIDE, ELEMENT: tl.constexpr, SCALED: tl.constexpr, B: tl.constexpr
):
    at = tl.cast(tl.program_id(0), tl.int64) * B + tl.arange(0, B)
    code = tl.load(codes_ptr + at, mask=at < n, other=0)
    code = code.to(tl.float8e4nv, bitcast=True) if ELEMENT == "e4m3" else code.to(tl.float8e5, bitcast=True)
    value = code.to(tl.float32)
    if SCALED:
        value = value * tl.load(scale_ptr + (at // k) * SCALE_STRIDE, mask=at < n, other=0.0)
    tl.store(values_ptr + at, value.to(values_ptr.dtype.element_ty), mask=at < n)


@lru_cache(PLANS)
def _encoder(format: Float8, rows: int, k: int, source: torch.dtype, codes: bool, values: str) -> Launch:
    limit = ELEMENTS[format.element][1]
    constants = {
        "RECIPROCAL": reciprocal(limit), "LIMIT": limit, "ELEMENT": format.element, "CODES": codes, "VALUES": values,
        "DTYPE": TL_DTYPE[source], **NO_FUSION,
    }  # fmt: skip
    if format.per == "row":
        once = k <= LONGEST
        width = triton.next_power_of_2(k) if once else TILE
        return Launch(
            _encode_row, (rows,), k=k, B=width, ONCE=once, num_warps=min(16, max(1, width // 512)), **constants
        )
    return Launch(_encode_tensor, (triton.cdiv(rows * k, TILE),), n=rows * k, B=TILE, N_PARTIALS=PARTIALS, **constants)


def quantize(
    format: Float8, x_RK: Tensor, dtype: torch.dtype | None, operand: bool, keep: bool
) -> tuple[Encoded | None, Tensor | None, Tensor | None]:
    """Encode x_RK: (codes and scales if `keep`, values in `dtype` unless it is None: `operand` or decoded, the operand's alpha)."""
    x_RK = x_RK.contiguous()
    (rows, k), device, row = x_RK.shape, x_RK.device, format.per == "row"
    codes = torch.empty(rows, k, dtype=torch.uint8, device=device) if keep else None
    scale = torch.empty(rows if row else 1, 1, dtype=torch.float32, device=device)
    values = None if dtype is None else torch.empty(rows, k, dtype=dtype, device=device)
    made = "" if dtype is None else "operand" if operand else "decode"
    launch = _encoder(format, rows, k, x_RK.dtype, keep, made)
    if row:
        launch(x_RK, codes, scale, values)
    else:
        launch(x_RK, absmax_partials(x_RK), codes, scale, values)
    encoded = None if codes is None else Encoded(codes.view(FLOAT8[format.element]), scale, None, None, k)
    return encoded, values, scale


@lru_cache(PLANS)
def _decoder(format: Float8, rows: int, k: int, scales: int, scaled: bool) -> Launch:
    return Launch(
        _decode, (triton.cdiv(rows * k, TILE),),
        n=rows * k, k=k, SCALE_STRIDE=int(scales > 1), ELEMENT=format.element, SCALED=scaled, B=TILE, **NO_FUSION,
    )  # fmt: skip


def decode(format: Float8, e: Encoded, dtype: torch.dtype, operand: bool) -> Tensor:
    """(R, K) values in `dtype`: the operand, or decoded."""
    assert e.scale is not None
    rows = e.codes.shape[0]
    values = torch.empty(rows, e.k, dtype=dtype, device=e.codes.device)
    launch = _decoder(format, rows, e.k, e.scale.numel(), not operand)
    launch(e.codes.contiguous().view(torch.uint8), e.scale.contiguous(), values)
    return values
