"""Square tiles that share a scale: mxfp8-32x32 and te-nvfp4-16x16, in one pass over x.

A program has as many rows as a tile, and several tiles side by side. Its values are blocks, one for each row of each
tile, as in blockscaled.py and dialects.py. One step differs: the largest magnitude of a block is replaced by that of
its tile. te-nvfp4's outer scale needs the absmax of the tensor; a pass before leaves it in parts.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from aoquant.formats import Encoded, MXSquare, NVFP4Dialect, Operand
from aoquant.formats.blockscaled import NVFP4_TOP
from aoquant.formats.elements import ELEMENTS, FLOAT32_MAX
from aoquant.formats.scales import reciprocal

from ..native import aligned
from ..quantized import Ask, Side
from .amax_kernels import PARTIALS, absmax_partials
from .blockscaled_kernels import Outputs
from .element_codes import (
    E2M1_UNIT,
    bits_float,
    e2m1_code,
    e2m1_rounded,
    e2m1_sign,
    e2m1_value,
    e8m0_byte,
    e8m0_inverse,
    e8m0_value,
    float_bits,
    least,
    load_e2m1,
    most,
    store4,
    te_factor,
    te_scale,
)
from .launch import LAUNCHES, Launch

SIDE_BY_SIDE = {16: 8, 32: 4}  # tiles of a program: 128 columns
WARPS = {16: 2, 32: 4}
NO_FUSION: dict[str, Any] = {"enable_fp_fusion": False}


@triton.jit
def _places(rows, k, T: tl.constexpr, N: tl.constexpr):
    """Of T * N blocks, N in each of T rows: (where a block begins; whether it is inside; its tile's scale)."""
    block = tl.arange(0, T * N)
    row = tl.program_id(0) * T + block // N
    column = tl.program_id(1) * N + block % N
    inside = (row < rows) & (column < k // T)
    return tl.cast(row, tl.int64) * k + column * T, inside, tl.program_id(0) * (k // T) + column


@triton.jit
def _of_tiles(amax_B, T: tl.constexpr, N: tl.constexpr):
    """The largest of the T blocks of each tile, for every block."""
    amax_N = tl.max(tl.reshape(amax_B, (T, N)), axis=0)
    return tl.reshape(tl.broadcast_to(amax_N[None, :], (T, N)), (T * N,))


@triton.jit
def _encode(
    x_ptr, partial_ptr, codes_ptr, scale_ptr, outer_ptr, alpha_ptr, values_ptr, rows, k,
    ELEMENT: tl.constexpr, LIMIT: tl.constexpr, MAX_POW2: tl.constexpr, RECIPROCAL: tl.constexpr, MANTISSA: tl.constexpr,
    LARGEST: tl.constexpr, POST: tl.constexpr, CODES: tl.constexpr, VALUES: tl.constexpr, T: tl.constexpr, N: tl.constexpr,
    N_PARTIALS: tl.constexpr,
):  # fmt: skip
    """ELEMENT: "e2m1" (te-nvfp4), "e4m3" or "e5m2" (MXFP8). RECIPROCAL: of LIMIT. VALUES: "", "operand" or "decode".

    alpha_ptr: for outer * POST, te-nvfp4's alpha.
    """
    origin, inside, tile = _places(rows, k, T, N)
    at = origin[:, None] + tl.arange(0, T)[None, :]
    x = float_bits(tl.load(x_ptr + at, mask=inside[:, None], other=0.0).to(tl.float32))
    magnitude = x & 0x7FFFFFFF
    amax = _of_tiles(tl.max(magnitude, axis=1), T, N)
    first = inside & (tl.arange(0, T * N) < N)  # a scale is written once, by the tile's first row
    if ELEMENT == "e2m1":
        outer = bits_float(tl.max(tl.load(partial_ptr + tl.arange(0, N_PARTIALS)), axis=0))
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            tl.store(outer_ptr, outer)
            tl.store(alpha_ptr, outer * POST)
        scale, inverse = te_scale(amax, te_factor(outer, LARGEST), RECIPROCAL, LARGEST)
        step = scale.to(tl.float32)
        if CODES:
            tl.store(scale_ptr + tile, scale.to(tl.uint8, bitcast=True), mask=first)
        y = bits_float(magnitude) * inverse[:, None]
        nan = y != y
        rounded = e2m1_rounded(tl.where(nan, 0.0, y))
        sign = tl.where(nan, E2M1_UNIT, e2m1_sign(x, magnitude))
        if CODES:
            word = (origin // 8)[:, None] + tl.arange(0, T // 8)[None, :]
            store4(codes_ptr, word, e2m1_code(rounded, sign), inside[:, None], T * N, T)
        if VALUES != "":
            if VALUES == "decode":
                step = step * outer * POST
            value = e2m1_value(rounded, sign) * step[:, None]
            tl.store(values_ptr + at, value.to(values_ptr.dtype.element_ty), mask=inside[:, None])
    else:
        byte = e8m0_byte(amax, "rceil", MAX_POW2, RECIPROCAL, MANTISSA)
        if CODES:
            tl.store(scale_ptr + tile, byte.to(tl.uint8), mask=first)
        y = least(most(bits_float(x) * e8m0_inverse(byte, "rceil")[:, None], -LIMIT), LIMIT)
        code = y.to(tl.float8e4nv) if ELEMENT == "e4m3" else y.to(tl.float8e5)
        if CODES:
            tl.store(codes_ptr + at, code.to(tl.uint8, bitcast=True), mask=inside[:, None])
        if VALUES != "":
            value = code.to(tl.float32) * e8m0_value(byte)[:, None]
            tl.store(values_ptr + at, value.to(values_ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _decode(
    codes_ptr, scale_ptr, outer_ptr, values_ptr, rows, k,
    ELEMENT: tl.constexpr, OUTER: tl.constexpr, POST: tl.constexpr, T: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """OUTER: whether the outer scale, and POST after it, multiply the scale."""
    origin, inside, tile = _places(rows, k, T, N)
    at = origin[:, None] + tl.arange(0, T)[None, :]
    byte = tl.load(scale_ptr + tile, mask=inside, other=0)
    if ELEMENT == "e2m1":
        step = byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        if OUTER:
            step = step * tl.load(outer_ptr) * POST
        word = (origin // 8)[:, None] + tl.arange(0, T // 8)[None, :]
        value = load_e2m1(codes_ptr, word, inside[:, None], T * N, T)
    else:
        step = e8m0_value(byte.to(tl.int32))
        code = tl.load(codes_ptr + at, mask=inside[:, None], other=0)
        code = code.to(tl.float8e4nv, bitcast=True) if ELEMENT == "e4m3" else code.to(tl.float8e5, bitcast=True)
        value = code.to(tl.float32)
    tl.store(values_ptr + at, (value * step[:, None]).to(values_ptr.dtype.element_ty), mask=inside[:, None])


def _common(format: MXSquare | NVFP4Dialect, rows: int, k: int) -> tuple[tuple[int, int], dict[str, Any]]:
    """(the grid, arguments of both kernels)."""
    t = format.tile_rows
    n = SIDE_BY_SIDE[t]
    arguments = {"rows": rows, "k": k, "ELEMENT": format.element, "T": t, "N": n, "num_warps": WARPS[t]}
    return (triton.cdiv(rows, t), triton.cdiv(k, t * n)), {**arguments, "POST": reciprocal(NVFP4_TOP), **NO_FUSION}


@lru_cache(LAUNCHES)
def _encoder(format: MXSquare | NVFP4Dialect, rows: int, k: int, codes: bool, values: str) -> Launch:
    grid, common = _common(format, rows, k)
    of = ELEMENTS[format.element]
    return Launch(
        _encode, grid, LIMIT=of.largest, MAX_POW2=of.max_pow2, RECIPROCAL=reciprocal(of.largest), MANTISSA=of.mantissa, LARGEST=FLOAT32_MAX,
        CODES=codes, VALUES=values, N_PARTIALS=PARTIALS, **common,
    )  # fmt: skip


def encode(format: MXSquare | NVFP4Dialect, x_RK: Tensor, ask: Ask, mix: Operand | None) -> Side:
    """Make what `ask` asks for of x_RK. mix: not used."""
    x_RK = x_RK.contiguous()
    made, outer, alpha, partials = Outputs.of(format, x_RK, ask), None, None, None
    if format.element == "e2m1":
        outer = torch.empty(1, 1, dtype=torch.float32, device=x_RK.device)
        alpha = torch.empty_like(outer)
        partials = absmax_partials(x_RK)
    launch = _encoder(format, *x_RK.shape, ask.codes, ask.form)
    launch(x_RK, partials, made.codes, made.scale, outer, alpha, made.values)
    return made.side(format, outer, alpha)


@lru_cache(LAUNCHES)
def _decoder(format: MXSquare | NVFP4Dialect, rows: int, k: int, outer: bool) -> Launch:
    grid, common = _common(format, rows, k)
    return Launch(_decode, grid, OUTER=outer, **common)


def decode(format: MXSquare | NVFP4Dialect, e: Encoded, dtype: torch.dtype, operand: bool) -> Tensor:
    """(R, K) values in `dtype`: the operand, or decoded."""
    rows = e.codes.shape[0]
    values = torch.empty(rows, e.k, dtype=dtype, device=e.codes.device)
    codes, scale = aligned(e.codes).view(torch.uint8), e.scales.contiguous().view(torch.uint8)
    _decoder(format, rows, e.k, not operand and e.outer is not None)(codes, scale, e.outer, values)
    return values
