"""The formats for gradients in one pass: rotate, scale, draw, and write codes, scales and the GEMM's operand.

Numbers are made where they are used: Philox's counter is the element's place, its key the layer's state, which is read on the device. Bytes
are `formats/stochastic.py`'s, so the rotation's butterflies and the sums over a block add in its order, neighbours first.

A contiguous (R, K) matrix whose groups divide K is a stream of groups, as in `blockscaled.py`. An NVFP4 outer scale needs the absmax of
what the rotation gives: a first pass rotates too, and keeps nothing but the maximum.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from aoquant.formats import Encoded, Random, Randomized, Rotated
from aoquant.formats.blockscaled import E4M3_FLOOR, PTS_FLOOR
from aoquant.formats.random import SIGNS
from aoquant.formats.scales import reciprocal
from aoquant.formats.stochastic import E4M3_LEAST, E4M3_MAX, EDEN_MAX, EDEN_SCALE, SR_MAX, THIRDS, MSEden, MXStochastic

from .amax import PARTIALS
from .blockscaled import LAUNCH
from .elements import (
    INF_BITS,
    NAN_BITS,
    bits_float,
    e2m1_rounded,
    e2m1_value,
    e8m0_byte,
    e8m0_inverse,
    e8m0_value,
    float_bits,
    least,
    most,
    pack_e2m1,
)

TILE = 1024


@triton.jit
def _words(state_ptr, side, first, N: tl.constexpr):
    """(N,) int32: the words of elements `first`, a multiple of 4, and the N - 1 after it."""
    seed = tl.load(state_ptr) & 0xFFFFFFFF
    module = ((tl.load(state_ptr + 1) << 3) | side) & 0xFFFFFFFF
    step = tl.load(state_ptr + 2)
    counter = first // 4 + tl.arange(0, N // 4)
    zero = tl.zeros_like(counter)
    w0, w1, w2, w3 = tl.philox(
        (module << 32) | seed,
        counter.to(tl.int32),
        (counter >> 32).to(tl.int32),
        (step + zero).to(tl.int32),
        ((step + zero) >> 32).to(tl.int32),
        10,
    )
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (N,)).to(tl.int32, bitcast=True)


@triton.jit
def _uniform(words):
    """float32 in [0, 1), multiples of 2^-24."""
    return ((words >> 8) & 0xFFFFFF).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def _load(
    x_ptr, state_ptr, signs_side, tile, n,
    SIZE: tl.constexpr, STAGES: tl.constexpr, FACTOR: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """TILE values in float32, rotated in groups of SIZE = 2^STAGES; as they are with SIZE 0."""
    at = tile * TILE + tl.arange(0, TILE)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    if SIZE > 0:
        signs = 1.0 - 2.0 * (_words(state_ptr, signs_side, tl.zeros([], tl.int64), SIZE) & 1).to(tl.float32)
        x = tl.reshape(tl.reshape(x, (TILE // SIZE, SIZE)) * signs[None, :], (TILE,))
        for stage in tl.static_range(0, STAGES):
            a, b = tl.split(tl.permute(tl.reshape(x, (TILE >> (stage + 1), 2, 1 << stage)), (0, 2, 1)))
            x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), (TILE,))
        x = x * FACTOR
    return x


@triton.jit(do_not_specialize=["signs_side"])
def _absmax(
    x_ptr, state_ptr, partial_ptr, signs_side, n,
    SIZE: tl.constexpr, STAGES: tl.constexpr, FACTOR: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Each program's largest magnitude among the rotated values, as bits, so that NaN is on top."""
    largest = tl.zeros([TILE], tl.int32)
    for tile in range(tl.program_id(0), tl.cdiv(n, TILE), tl.num_programs(0)):
        x = _load(x_ptr, state_ptr, signs_side, tl.cast(tile, tl.int64), n, SIZE, STAGES, FACTOR, TILE)
        largest = tl.maximum(largest, float_bits(x) & 0x7FFFFFFF)
    tl.store(partial_ptr + tl.program_id(0), tl.max(largest, axis=0))


@triton.jit(do_not_specialize=["signs_side"])
def _rotate(
    x_ptr, state_ptr, y_ptr, signs_side, n,
    SIZE: tl.constexpr, STAGES: tl.constexpr, FACTOR: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    y = _load(x_ptr, state_ptr, signs_side, tile, n, SIZE, STAGES, FACTOR, TILE)
    at = tile * TILE + tl.arange(0, TILE)
    tl.store(y_ptr + at, y, mask=at < n)


@triton.jit
def _sum(x_NB, NB: tl.constexpr):
    """(NB,) sums of blocks of 16, neighbours first. Every value of a block gets the sum, as in a rotation: layouts stay what they are."""
    x = tl.reshape(x_NB, (NB * 16,))
    for stage in tl.static_range(0, 4):
        a, b = tl.split(tl.permute(tl.reshape(x, (NB * 16 >> (stage + 1), 2, 1 << stage)), (0, 2, 1)))
        x = tl.reshape(tl.permute(tl.join(a + b, a + b), (0, 2, 1)), (NB * 16,))
    return tl.max(tl.reshape(x, (NB, 16)), axis=1)


@triton.jit(do_not_specialize=["side", "signs_side"])
def _draw(
    x_ptr, state_ptr, partial_ptr, codes_ptr, scale_ptr, outer_ptr, values_ptr, side, signs_side, n,
    KIND: tl.constexpr, SIZE: tl.constexpr, STAGES: tl.constexpr, FACTOR: tl.constexpr,
    PTS_RECIPROCAL: tl.constexpr, RECIPROCAL: tl.constexpr, LEAST: tl.constexpr, SMALLEST_PTS: tl.constexpr, NORMAL: tl.constexpr,
    THIRDS: tl.constexpr, N_PARTIALS: tl.constexpr, NB: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """KIND: "mxfp4-sr", "nvfp4-sr" or "ms-eden"."""
    tile = tl.program_id(0).to(tl.int64)
    x = tl.reshape(_load(x_ptr, state_ptr, signs_side, tile, n, SIZE, STAGES, FACTOR, NB * B), (NB, B))
    bits = float_bits(x)
    magnitude = bits & 0x7FFFFFFF
    amax = tl.max(magnitude, axis=1)
    block = tile * NB + tl.arange(0, NB)
    inside = block < n // B
    if KIND == "mxfp4-sr":
        byte = e8m0_byte(amax, "floor", 2, 1.0, 1)
        inverse, scale_value, stored = e8m0_inverse(byte, "floor"), e8m0_value(byte), byte.to(tl.uint8)
        outer = tl.full([], THIRDS, tl.float32)
        y = bits_float(magnitude) * 0.75 * inverse[:, None]
    else:
        largest = tl.max(tl.load(partial_ptr + tl.arange(0, N_PARTIALS)), axis=0)
        outer = most(bits_float(largest) * PTS_RECIPROCAL, SMALLEST_PTS)
        ratio = bits_float(tl.where(amax == INF_BITS, NAN_BITS, amax)) * RECIPROCAL
        ratio = most(tl.div_rn(ratio, outer + tl.zeros_like(ratio)), LEAST)
        scale = least(ratio, 448.0).to(tl.float8e4nv)
        scale_value = scale.to(tl.float32)
        inverse = tl.div_rn(tl.div_rn(tl.full([], 1.0, tl.float32), outer) + tl.zeros_like(ratio), scale_value)
        stored = scale.to(tl.uint8, bitcast=True)
        y = bits_float(magnitude) * inverse[:, None]

    if KIND == "ms-eden":
        index = float_bits(e2m1_rounded(y)) & 7
        kept = _sum(y * e2m1_value(index, 0), NB)
        length = _sum(y * y, NB)
        grown = scale_value * tl.where(kept == 0.0, 1.0, tl.div_rn(length, kept))
        step = bits_float(float_bits(most(grown, NORMAL)) & 0x7F800000) * 0.125
        t = tl.div_rn(grown, step)
        down = tl.floor(t)
        u = _uniform(_words(state_ptr, side, tile * NB, NB))
        rounded = least((down + (u < t - down).to(tl.float32)) * step, 448.0).to(tl.float8e4nv)
        scale_value = rounded.to(tl.float32)
        stored = rounded.to(tl.uint8, bitcast=True)
    else:
        v = tl.minimum(y, 6.0)
        p = float_bits(tl.maximum(v, 1.0)) & 0x7F800000
        t = v * bits_float(0x7F800000 - p)  # v / p * 2
        down = tl.floor(t)
        u = tl.reshape(_uniform(_words(state_ptr, side, tile * (NB * B), NB * B)), (NB, B))
        index = (down + (u < t - down).to(tl.float32)).to(tl.int32) + ((p - (127 << 23)) >> 22)

    keep = tl.where(inverse == inverse, 255, 0)  # NaN has no code, and no sign
    codes = pack_e2m1(index, bits, NB, B) & keep[:, None]
    half = tile * (NB * B // 2) + (tl.arange(0, NB)[:, None] * (B // 2) + tl.arange(0, B // 2)[None, :])
    tl.store(codes_ptr + half, codes.to(tl.uint8), mask=inside[:, None])
    tl.store(scale_ptr + block, stored, mask=inside)
    at = tile * (NB * B) + (tl.arange(0, NB)[:, None] * B + tl.arange(0, B)[None, :])
    value = e2m1_value(index, bits ^ magnitude) * scale_value[:, None]
    tl.store(values_ptr + at, value.to(values_ptr.dtype.element_ty), mask=inside[:, None])
    if tl.program_id(0) == 0:
        tl.store(outer_ptr, outer)


def _rotation(size: int) -> dict[str, Any]:
    return {"SIZE": size, "STAGES": size.bit_length() - 1 if size else 0, "FACTOR": size**-0.5 if size else 1.0}


def rotate(format: Rotated, x_RK: Tensor, random: Random) -> Tensor:
    """`formats.rotated.rotate(x_RK, random.signs(format.size))`: for an inner format that is not of this file."""
    x_RK = x_RK.contiguous()
    y = torch.empty(x_RK.shape, dtype=torch.float32, device=x_RK.device)
    _rotate[(triton.cdiv(x_RK.numel(), TILE),)](
        x_RK, random.state, y, SIGNS + random.side // 2, x_RK.numel(), TILE=TILE, **_rotation(format.size), **LAUNCH
    )
    return y


def quantize(format: Randomized, x_RK: Tensor, dtype: torch.dtype, random: Random) -> tuple[Encoded, Tensor, Tensor]:
    """(codes and scales, operand in `dtype`, its alpha) of x_RK, as `format.encode(x_RK, random=random)` makes them."""
    size, inner = (format.size, format.inner) if isinstance(format, Rotated) else (0, format)
    x_RK = x_RK.contiguous()
    (rows, k), device, block = x_RK.shape, x_RK.device, inner.block
    assert block is not None
    codes = torch.empty(rows, k // 2, dtype=torch.uint8, device=device)
    scale = torch.empty(rows, k // block, dtype=torch.uint8, device=device)
    outer = torch.empty(1, 1, dtype=torch.float32, device=device)
    values = torch.empty(rows, k, dtype=dtype, device=device)
    rotation, signs_side, partials = _rotation(size), SIGNS + random.side // 2, None
    amax_over_scale, largest, smallest = (
        (EDEN_MAX, EDEN_SCALE, E4M3_LEAST) if isinstance(inner, MSEden) else (SR_MAX, E4M3_MAX, E4M3_FLOOR)
    )
    if not isinstance(inner, MXStochastic):
        partials = torch.empty(PARTIALS, dtype=torch.int32, device=device)
        _absmax[(PARTIALS,)](x_RK, random.state, partials, signs_side, x_RK.numel(), TILE=TILE, **rotation, **LAUNCH)
    _draw[(triton.cdiv(x_RK.numel(), TILE),)](
        x_RK, random.state, partials, codes, scale, outer, values, random.side, signs_side, x_RK.numel(), KIND=inner.name,
        PTS_RECIPROCAL=reciprocal(amax_over_scale * largest), RECIPROCAL=reciprocal(amax_over_scale), LEAST=smallest,
        SMALLEST_PTS=8 * PTS_FLOOR, NORMAL=E4M3_FLOOR, THIRDS=THIRDS, N_PARTIALS=PARTIALS,
        NB=TILE // block, B=block, **rotation, **LAUNCH,
    )  # fmt: skip
    native = torch.float8_e8m0fnu if isinstance(inner, MXStochastic) else torch.float8_e4m3fn
    return Encoded(codes, scale.view(native), None, outer, k), values, outer
