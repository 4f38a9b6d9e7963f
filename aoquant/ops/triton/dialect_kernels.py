"""FP4 dialects in one pass, as `formats/dialects.py` defines them: blocks of 32 with e8m0 scales, blocks of 16 with
e4m3 scales.

The frame is blockscaled.py's: a stream of blocks, the absmax of the tensor from a pass before, the encoder walking
backwards. The dialects differ in the scale of a block and in the factor or divisor of its values. A value that 0 /
0 or a NaN scale made NaN has code 0.

QuEST's trust mask is made by the same kernel: it then writes only which values an e8m0 block clips.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from aoquant.formats import Encoded, MXFP4Dialect, NVFP4Dialect, Operand
from aoquant.formats.blockscaled import NVFP4_TOP, PTS_FLOOR
from aoquant.formats.dialects import QUEST
from aoquant.formats.elements import FLOAT32_MAX
from aoquant.formats.scales import reciprocal
from aoquant.transforms import Hadamard

from ..quantized import Side
from . import tile_kernels
from .amax_kernels import PARTIALS, absmax_partials
from .blockscaled_kernels import LAUNCH, TILE, blocks_of, load_blocks, memory, mixing, within
from .element_codes import (
    INF_BITS,
    NAN_BITS,
    bits_float,
    e2m1_rounded,
    e2m1_value,
    e8m0_value,
    float_bits,
    least,
    most,
    pack_e2m1,
    te_factor,
    te_scale,
    unpack4,
)
from .hadamard_kernels import ENCODE_WARPS, WARP
from .launch import LAUNCHES, Launch

HUGE_BITS = tl.constexpr(0x5D800000)  # 2^60


@triton.jit
def _pairs(x, NB: tl.constexpr, HALF: tl.constexpr):
    """(NB, 2 HALF) -> (NB, HALF): sums of neighbours."""
    low, high = tl.split(tl.reshape(x, (NB, HALF, 2)))
    return low + high


@triton.jit
def _mean(x, NB: tl.constexpr):
    """Of blocks of 32, by pairs of neighbours."""
    s = _pairs(_pairs(_pairs(_pairs(_pairs(x, NB, 16), NB, 8), NB, 4), NB, 2), NB, 1)
    return tl.reshape(s, (NB,)) * 0.03125


@triton.jit
def _deviation(x, amax_bits, NB: tl.constexpr):
    huge = amax_bits > HUGE_BITS
    x = x * tl.where(huge, 2.0**-96, 1.0)[:, None]
    mean, square = _mean(x, NB), _mean(x * x, NB)
    return tl.sqrt_rn(most(square - mean * mean, 0.0)) * tl.where(huge, 2.0**96, 1.0)


# `rows` unspecialised: across memory a lane reads its own blocks' values, and not eight of neighbours' at once
@triton.jit(do_not_specialize=["rows"])
def _encode(
    x_ptr, partial_ptr, codes_ptr, scale_ptr, outer_ptr, alpha_ptr, values_ptr, clipped_ptr, n_blocks, rows, k, fixed,
    DIALECT: tl.constexpr, DYNAMIC: tl.constexpr, GAIN: tl.constexpr, TINY: tl.constexpr, POST: tl.constexpr,
    SIXTH: tl.constexpr, PTS_RECIPROCAL: tl.constexpr, SMALLEST_PTS: tl.constexpr, LARGEST: tl.constexpr, FACTOR: tl.constexpr,
    CODES: tl.constexpr, VALUES: tl.constexpr, NB: tl.constexpr, B: tl.constexpr, N_PARTIALS: tl.constexpr,
    G: tl.constexpr, SIGNS: tl.constexpr, MIX: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """DIALECT: "absmax" or "quest" (e8m0), or "xx", "qutlass", "te" (e4m3). VALUES: "" none, "operand" without,
    "decode" with the outer scale.

    clipped_ptr: for a bit of each value, 1 where an e8m0 block's largest code clips; or None. G, SIGNS, MIX: a Hadamard
        transform's, or 0. ACROSS: as in `blocks_of`, over (rows, k). alpha_ptr: for outer * POST, where alpha is not
        the outer scale; or None.
    """
    one = tl.full([], 1.0, tl.float32)
    outer = one
    encode = one
    if B == 16:
        if DYNAMIC:
            outer = bits_float(tl.max(tl.load(partial_ptr + tl.arange(0, N_PARTIALS)), axis=0))
            if DIALECT != "te":
                outer = most(outer * PTS_RECIPROCAL, SMALLEST_PTS)
        else:
            outer = fixed + tl.zeros([], tl.float32)
        if tl.program_id(0) == 0:
            tl.store(outer_ptr, outer)
            if alpha_ptr is not None:
                tl.store(alpha_ptr, outer * POST)
        if DIALECT == "qutlass":
            encode = tl.div_rn(one, outer)
        elif DIALECT == "te":
            encode = te_factor(outer, LARGEST)

    n_tiles = tl.cdiv(rows, ACROSS) * (k // B) if ACROSS else tl.cdiv(n_blocks, NB)
    for i in range(tl.program_id(0), n_tiles, tl.num_programs(0)):
        tile = tl.cast(n_tiles - 1 - i, tl.int64)
        block, there = blocks_of(tile, n_blocks, rows, k, NB, B, ACROSS)
        at = within(tile, block, NB, B, ACROSS)
        inside = there[:, None]
        x = load_blocks(x_ptr, tile, n_blocks, rows, k, NB, B, G, SIGNS, MIX, ACROSS)
        magnitude = x & 0x7FFFFFFF
        amax = tl.max(magnitude, axis=1)
        ones = tl.full([NB], 1.0, tl.float32)
        if B == 32:
            v = bits_float(amax)
            if DIALECT == "quest":
                v = _deviation(bits_float(x), amax, NB) * FACTOR
            byte = (float_bits(v + TINY) >> 23) & 0xFF
            inverse = bits_float(tl.where(byte == 255, NAN_BITS, tl.where(byte == 254, 1 << 22, (254 - byte) << 23)))
            y = bits_float(magnitude) * inverse[:, None] * GAIN
            step = e8m0_value(byte)
            stored = byte.to(tl.uint8)
            if clipped_ptr is not None:
                bit = tl.reshape((y >= 6.0).to(tl.int32), (NB, B // 8, 8)) << tl.arange(0, 8)[None, None, :]
                eighth = within(tile, block, NB, B // 8, ACROSS)
                tl.store(clipped_ptr + eighth, tl.sum(bit, axis=2).to(tl.uint8), mask=inside)
        elif DIALECT == "te":
            scale, inverse = te_scale(amax, encode, SIXTH, LARGEST)
            step = scale.to(tl.float32)
            y = bits_float(magnitude) * inverse[:, None]
            stored = scale.to(tl.uint8, bitcast=True)
        else:
            top = bits_float(tl.where(amax == INF_BITS, NAN_BITS, amax))
            ratio = tl.div_rn(top, ones * (outer * 6.0)) if DIALECT == "xx" else encode * (top * SIXTH)
            scale = least(ratio, 448.0).to(tl.float8e4nv)
            step = scale.to(tl.float32)
            if DIALECT == "xx":
                y = tl.div_rn(bits_float(magnitude), (step * outer)[:, None] + tl.zeros([NB, B], tl.float32))
            else:
                y = bits_float(magnitude) * tl.div_rn(ones, step * tl.div_rn(one, encode))[:, None]
            stored = scale.to(tl.uint8, bitcast=True)
        if CODES:
            tl.store(scale_ptr + block, stored, mask=there)
        nan = y != y
        index = float_bits(e2m1_rounded(tl.where(nan, 0.0, y)))
        signed = tl.where(nan, 0, x)
        if CODES:
            half = within(tile, block, NB, B // 2, ACROSS)
            tl.store(codes_ptr + half, pack_e2m1(index, signed, NB, B).to(tl.uint8), mask=inside)
        if VALUES != "":
            if VALUES == "decode":
                step = step * outer * POST
            value = e2m1_value(index, signed & -0x80000000) * step[:, None]
            tl.store(values_ptr + at, value.to(values_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _decode(
    codes_ptr, scale_ptr, outer_ptr, values_ptr, n_blocks, blocks_per_row, OUTER_STRIDE,
    OUTER: tl.constexpr, POST: tl.constexpr, NB: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """OUTER: whether there is an outer scale, one a row (OUTER_STRIDE 1) or one in all (0); POST multiplies the scales
    after it.
    """
    tile = tl.program_id(0).to(tl.int64)
    block = tile * NB + tl.arange(0, NB)
    at = (tile * (NB * B)) + (tl.arange(0, NB)[:, None] * B + tl.arange(0, B)[None, :])
    inside = block < n_blocks
    byte = tl.load(scale_ptr + block, mask=inside, other=0)
    step = e8m0_value(byte.to(tl.int32)) if B == 32 else byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    if OUTER:
        step = step * tl.load(outer_ptr + (block // blocks_per_row) * OUTER_STRIDE, mask=inside, other=0.0)
    step = step * POST
    half = (tile * (NB * B // 2)) + (tl.arange(0, NB)[:, None] * (B // 2) + tl.arange(0, B // 2)[None, :])
    code = unpack4(tl.load(codes_ptr + half, mask=inside[:, None], other=0), NB, B)
    value = e2m1_value(code, (code & 8) << 28) * step[:, None]
    tl.store(values_ptr + at, value.to(values_ptr.dtype.element_ty), mask=inside[:, None])


def encode(
    format: MXFP4Dialect | NVFP4Dialect,
    x_RK: Tensor,
    dtype: torch.dtype | None,
    operand: bool,
    keep: bool,
    measured: Tensor | None,
    mix: Operand | None,
) -> Side:
    """Codes and scales of x_RK if `keep`, values in `dtype` unless it is None: `operand` or decoded.

    mix: its Hadamard transform is applied first, in the same pass, before an e8m0 format. measured: not used.
    """
    transform, inverse = mixing(mix)
    x_RK, across = memory(x_RK) if transform is None else (x_RK.contiguous(), False)
    (rows, k), device = x_RK.shape, x_RK.device
    codes = torch.empty(rows, k // 2, dtype=torch.uint8, device=device) if keep else None
    scale = torch.empty(rows, k // format.block, dtype=torch.uint8, device=device) if keep else None
    values = None if dtype is None else torch.empty(rows, k, dtype=dtype, device=device)
    outer = partials = None
    if format.per_tensor or format.fixed:
        outer = torch.empty(1, 1, dtype=torch.float32, device=device)
        partials = None if format.fixed else absmax_partials(x_RK.t() if across else x_RK)
    alpha = outer if outer is None or format.post == 1.0 else torch.empty_like(outer)
    made = "" if dtype is None else "operand" if operand else "decode"
    launch = _encoder(format, rows, k, keep, made, transform, inverse, across)
    launch(x_RK, partials, codes, scale, outer, None if alpha is outer else alpha, values, None)
    if format.gain != 1:
        alpha = torch.full((1, 1), format.post, dtype=torch.float32, device=device)
    if codes is None or scale is None:
        return Side(None, values, alpha)
    return Side(Encoded(codes, scale.view(format.block_scale), None, outer, k), values, alpha)


def saturated(format: MXFP4Dialect, x_RK: Tensor, mix: Operand) -> Tensor:
    """(R, K / 8) uint8: bits of `format.saturated(x_RK, format.encode(x_RK))`, of transformed values if `mix` has a
    transform.
    """
    x_RK, (transform, inverse) = x_RK.contiguous(), mixing(mix)
    (rows, k), device = x_RK.shape, x_RK.device
    clipped = torch.empty(rows, k // 8, dtype=torch.uint8, device=device)
    launch = _encoder(format, rows, k, False, "", transform, inverse, False)
    launch(x_RK, None, None, None, None, None, None, clipped)
    return clipped


@lru_cache(LAUNCHES)
def _encoder(
    format: MXFP4Dialect | NVFP4Dialect,
    rows: int,
    k: int,
    codes: bool,
    values: str,
    transform: Hadamard | None,
    inverse: bool,
    across: bool,
) -> Launch:
    warps, tile = 1, TILE
    kind: dict[str, Any] = {
        "DIALECT": format.statistic, "GAIN": format.gain, "TINY": format.tiny, "DYNAMIC": format.per_tensor, "G": 0, "SIGNS": 0, "MIX": 1.0,
    }  # fmt: skip
    if transform is not None:
        kind |= {"G": transform.size, "SIGNS": transform.signs, "MIX": transform.factor(inverse)}
        warps = ENCODE_WARPS[transform.size]
        tile = WARP * warps * transform.size  # a block of the transform for each lane
    high = TILE // format.block if across else 0
    programs = triton.cdiv(rows, high) * (k // format.block) if across else triton.cdiv(rows * k, tile)
    return Launch(
        _encode, (programs,), n_blocks=rows * k // format.block, rows=rows, k=k, fixed=format.fixed[0] if format.fixed else 0.0, ACROSS=high,
        POST=format.post, SIXTH=reciprocal(6.0), PTS_RECIPROCAL=reciprocal(NVFP4_TOP), SMALLEST_PTS=PTS_FLOOR, LARGEST=FLOAT32_MAX,
        FACTOR=QUEST, CODES=codes, VALUES=values, NB=tile // format.block, B=format.block, N_PARTIALS=PARTIALS,
        **kind, **LAUNCH | {"num_warps": warps},
    )  # fmt: skip


@lru_cache(LAUNCHES)
def _decoder(format: MXFP4Dialect | NVFP4Dialect, rows: int, k: int, outer_rows: int, operand: bool) -> Launch:
    return Launch(
        _decode, (triton.cdiv(rows * k, TILE),), n_blocks=rows * k // format.block, blocks_per_row=k // format.block,
        OUTER_STRIDE=int(outer_rows > 1), OUTER=outer_rows > 0, POST=1.0 if operand else format.post, NB=TILE // format.block,
        B=format.block, **LAUNCH,
    )  # fmt: skip


def decode(format: MXFP4Dialect | NVFP4Dialect, e: Encoded, dtype: torch.dtype, operand: bool) -> Tensor:
    """(R, K) values in `dtype`: the operand, or decoded."""
    assert e.scale is not None
    if isinstance(format, NVFP4Dialect) and format.tile > 1:
        return tile_kernels.decode(format, e, dtype, operand)
    rows = e.codes.shape[0]
    values = torch.empty(rows, e.k, dtype=dtype, device=e.codes.device)
    outer = None if operand else e.outer
    codes, scale = e.codes.contiguous().view(torch.uint8), e.scale.contiguous().view(torch.uint8)
    _decoder(format, rows, e.k, 0 if outer is None else outer.shape[0], operand)(codes, scale, outer, values)
    return values
