"""FP4 dialects in one pass, as `formats/dialects.py` defines them: blocks of 32 with e8m0 scales, blocks of 16 with
e4m3 scales.

The frame is blockscaled.py's: a stream of blocks, the absmax of the tensor from a pass before, the encoder walking
backwards. The dialects differ in the scale of a block and in the factor or divisor of its values. A value that 0 /
0 or a NaN scale made NaN has code 0.

QuEST's trust mask is made by the same kernel: it then writes only which values an e8m0 block clips.
"""

from __future__ import annotations

from functools import lru_cache

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

from ..quantized import Ask, Side
from . import blockscaled_kernels, tile_kernels
from .amax_kernels import absmax_partials
from .blockscaled_kernels import Outputs, blocks_of, frame, load_blocks, memory, mixing, within
from .element_codes import (
    E2M1_UNIT,
    INF_BITS,
    NAN_BITS,
    bits_float,
    e2m1_code,
    e2m1_rounded,
    e2m1_sign,
    e2m1_value,
    e8m0_value,
    float_bits,
    least,
    most,
    store4,
    te_factor,
    te_scale,
)
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
    SIXTH: tl.constexpr, PTS_RECIPROCAL: tl.constexpr, SMALLEST_PTS: tl.constexpr, LARGEST: tl.constexpr, QUEST: tl.constexpr,
    CODES: tl.constexpr, VALUES: tl.constexpr, NB: tl.constexpr, B: tl.constexpr, N_PARTIALS: tl.constexpr,
    G: tl.constexpr, SIGNS: tl.constexpr, FACTOR: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """DIALECT: "absmax" or "quest" (e8m0), or "xx", "qutlass", "te" (e4m3). VALUES: "" none, "operand" without,
    "decode" with the outer scale.

    clipped_ptr: for a bit of each value, 1 where an e8m0 block's largest code clips; or None. alpha_ptr: for outer *
        POST, where alpha is not the outer scale; or None. G, SIGNS, FACTOR: a Hadamard transform's, or 0. ACROSS: as
        in `blocks_of`, over (rows, k).
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
        x = load_blocks(x_ptr, tile, n_blocks, rows, k, NB, B, G, SIGNS, FACTOR, ACROSS)
        magnitude = x & 0x7FFFFFFF
        amax = tl.max(magnitude, axis=1)
        ones = tl.full([NB], 1.0, tl.float32)
        if B == 32:
            v = bits_float(amax)
            if DIALECT == "quest":
                v = _deviation(bits_float(x), amax, NB) * QUEST
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
        rounded = e2m1_rounded(tl.where(nan, 0.0, y))
        sign = tl.where(nan, E2M1_UNIT, e2m1_sign(x, magnitude))
        if CODES:
            store4(codes_ptr, within(tile, block, NB, B // 8, ACROSS), e2m1_code(rounded, sign), inside, NB, B)
        if VALUES != "":
            if VALUES == "decode":
                step = step * outer * POST
            value = e2m1_value(rounded, sign) * step[:, None]
            tl.store(values_ptr + at, value.to(values_ptr.dtype.element_ty), mask=inside)


def encode(format: MXFP4Dialect | NVFP4Dialect, x_RK: Tensor, ask: Ask, mix: Operand | None) -> Side:
    """Make what `ask` asks for of x_RK; an e8m0 format behind the Hadamard transform of `mix`, in the same pass."""
    transform, inverse = mixing(mix)
    x_RK, across = memory(x_RK) if transform is None else (x_RK.contiguous(), False)
    made, outer, partials = Outputs.of(format, x_RK, ask), None, None
    if format.per_tensor or format.fixed:
        outer = torch.empty(1, 1, dtype=torch.float32, device=x_RK.device)
        partials = None if format.fixed else absmax_partials(x_RK.t() if across else x_RK)
    alpha = outer if outer is None or format.post == 1.0 else torch.empty_like(outer)
    launch = _encoder(format, *x_RK.shape, ask.codes, ask.form, transform, inverse, across)
    launch(x_RK, partials, made.codes, made.scale, outer, None if alpha is outer else alpha, made.values, None)
    if format.gain != 1:
        alpha = torch.full((1, 1), format.post, dtype=torch.float32, device=x_RK.device)
    return made.side(format, outer, alpha)


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
    grid, common = frame(format, rows, k, transform, inverse, across)
    return Launch(
        _encode, grid, fixed=format.fixed[0] if format.fixed else 0.0, DIALECT=format.statistic, GAIN=format.gain,
        TINY=format.tiny, DYNAMIC=format.per_tensor, POST=format.post, SIXTH=reciprocal(6.0), PTS_RECIPROCAL=reciprocal(NVFP4_TOP),
        SMALLEST_PTS=PTS_FLOOR, LARGEST=FLOAT32_MAX, QUEST=QUEST, CODES=codes, VALUES=values, **common,
    )  # fmt: skip


def decode(format: MXFP4Dialect | NVFP4Dialect, e: Encoded, dtype: torch.dtype, operand: bool) -> Tensor:
    """(R, K) values in `dtype`: the operand, or decoded."""
    if isinstance(format, NVFP4Dialect) and format.tile > 1:
        return tile_kernels.decode(format, e, dtype, operand)
    return blockscaled_kernels.decode(format, e, dtype, operand, 1.0 if operand else format.post)
