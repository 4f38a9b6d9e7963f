"""The formats for gradients in one pass: rotate, scale, draw, and write codes, scales and the GEMM's operand.

Random numbers are made where they are used. Philox's counter is the element's place, and its key is the layer's state,
which the kernel reads on the device. The bytes are those of `formats/stochastic.py`, so the rotation's butterflies and
the sums over a block add in its order, neighbours first. A rotation's butterflies are hadamard.py's, a lane for 32
values and two exchanges between lanes for longer ones; signs are bits of two integers, which every program draws once.

A matrix is a stream of groups, of the rotation or else of the scales. wgrad's operands are transposed views of
contiguous matrices. Their groups lie across memory, and groups of neighbouring rows lie side by side. A lane that holds
one group reads them equally well, and no copy is made.

An NVFP4 outer scale needs the absmax of the rotated values. So a first pass rotates, in float32, and leaves the
maximum; a second pass draws.

A part of a matrix (PLACED) draws by the place of its values in the whole matrix: `counter` is the place of each block
there, and `place` is where the block is read and written.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from aoquant.formats import Operand, Random
from aoquant.formats.blockscaled import E4M3_FLOOR, PTS_FLOOR
from aoquant.formats.random import SIGNS, Place, Span
from aoquant.formats.scales import reciprocal
from aoquant.formats.stochastic import THIRDS

from ..quantized import Ask, Side
from .amax_kernels import PARTIALS, absmax_partials
from .blockscaled_kernels import LAUNCH, Outputs, memory
from .element_codes import (
    E2M1_BASE_BITS,
    E2M1_UNIT,
    INF_BITS,
    NAN_BITS,
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
    most,
    store4,
)
from .hadamard_kernels import WARP, butterflies
from .launch import LAUNCHES, Launch

TILE = 1024
PART = 32  # of a rotation's values, those that a lane holds: more of them and registers spill


@triton.jit
def _times(a, FACTOR: tl.constexpr):
    """(high, low) words of a product. One instruction, where `tl.philox` takes one for each word."""
    wide = a.to(tl.uint64) * FACTOR
    return (wide >> 32).to(tl.uint32), wide.to(tl.uint32)


@triton.jit
def philox_key(state_ptr, side):
    """(two words of the key, two of the step) of a side. A kernel reads them before its loop, whose stores might change
    them for all that a compiler knows.
    """
    module = (tl.load(state_ptr + 1) << 3) | side
    step = tl.load(state_ptr + 2)
    return tl.load(state_ptr).to(tl.uint32), module.to(tl.uint32), step.to(tl.uint32), (step >> 32).to(tl.uint32)


@triton.jit
def philox(key, counter):
    """The four uint32 words of each counter, of elements 4 * counter .. 4 * counter + 3: int64, or int32 where none is
    negative, which spares two of the 20 products.
    """
    k0, k1, c2, c3 = key
    c0 = counter.to(tl.uint32)
    c1 = tl.full([], 0, tl.uint32)
    if counter.dtype == tl.int64:
        c1 = (counter >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        a, b = _times(c0, 0xD2511F53)
        c, d = _times(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = c ^ c1 ^ k0, d, a ^ c3 ^ k1, b
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def words(key, first, N: tl.constexpr, M: tl.constexpr):
    """(N, M) int32: the words of elements `first`, (N,) multiples of 4, and of the M - 1 after each."""
    w0, w1, w2, w3 = philox(key, (first // 4)[:, None] + tl.arange(0, M // 4)[None, :])
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (N, M)).to(tl.int32, bitcast=True)


@triton.jit
def uniform(words):
    """float32 in [0, 1), multiples of 2^-24."""
    return ((words >> 8) & 0xFFFFFF).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def safe_scale(amax_bits, outer, inverse_outer, RECIPROCAL: tl.constexpr, LEAST: tl.constexpr):
    """amax of each block -> (e4m3 scale under which nothing clips, what x is multiplied by)."""
    ratio = bits_float(tl.where(amax_bits == INF_BITS, NAN_BITS, amax_bits)) * RECIPROCAL
    ratio = most(tl.div_rn(ratio, outer + tl.zeros_like(ratio)), LEAST)
    scale = least(ratio, 448.0).to(tl.float8e4nv)
    return scale, tl.div_rn(inverse_outer + tl.zeros_like(ratio), scale.to(tl.float32))


@triton.jit
def e2m1_drawn(y, word):
    """y >= 0 -> (steps, p): half p times steps, an int32, is a neighbouring e2m1 magnitude, up or down by the uniform
    number word >> 8, in units of 2^-24; p: bits of the power of two in max(y, 1).

    u < t - down for t = y / p * 2 and its integer part, in units of 2^-24: what rounds up to an integer t there takes a
    carry from 2^24 - 1 - u if it is larger than u.
    """
    v = tl.minimum(y, 6.0)
    p = float_bits(tl.maximum(v, 1.0)) & 0x7F800000
    t = tl.ceil(v * bits_float((152 << 23) - (p - (127 << 23)))).to(tl.int32)
    return (t + (0xFFFFFF - ((word >> 8) & 0xFFFFFF))) >> 24, p


@triton.jit
def _signs(state_ptr, side, SIZE: tl.constexpr):
    """(low, high): the signs of a rotation, 1 for minus, the first 64 in low."""
    bit = (words(philox_key(state_ptr, side), tl.zeros([1], tl.int32), 1, SIZE) & 1).to(tl.int64)
    at = tl.arange(0, SIZE)[None, :]
    bit = bit << (at % 64)
    return tl.sum(tl.sum(tl.where(at < 64, bit, 0), axis=1)), tl.sum(tl.sum(tl.where(at < 64, 0, bit), axis=1))


@triton.jit
def _far(x, N: tl.constexpr, S: tl.constexpr, DISTANCE: tl.constexpr):
    """Butterflies between rows of (N, S) that are DISTANCE apart."""
    x = tl.permute(tl.reshape(x, (N // DISTANCE // 2, 2, DISTANCE, S)), (0, 2, 3, 1))
    a, b = tl.split(x)
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 3, 1, 2)), (N, S))


@triton.jit
def _tile(
    x_ptr, low, high, tile, rows, columns,
    ACROSS: tl.constexpr, ROTATED: tl.constexpr, FACTOR: tl.constexpr, G: tl.constexpr, S: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """T groups of G values in parts of S: ((T * G / S, S) float32, rotated if ROTATED; place of each part's first;
    which there are).

    Parts are sorted by their place in the group: the T first ones, the T second ones, and so on. ACROSS: the memory of
    x is that of its transpose, (columns, rows).
    """
    N: tl.constexpr = T * G // S
    n = tl.arange(0, N)
    group = n % T if S < G else n
    part = n // T * S if S < G else tl.zeros_like(n)
    if ACROSS:
        wide = tl.cdiv(rows, T)
        row, column = (tile % wide) * T, (tile // wide) * G
        inside = row + group < rows
        place = (row + group) * columns + column + part
        x_ptr += column * rows + row
        origin, step = (group + part * rows)[:, None], rows
    else:
        inside = tile * T + group < tl.cast(rows, tl.int64) * columns // G
        place = (tile * T + group) * G + part
        x_ptr += tile * (T * G)
        origin, step = (group * G + part)[:, None], 1
    if ROTATED:
        word = (tl.where(part < 64, low, high) >> (part % 64))[:, None]
        x = butterflies(x_ptr, origin, step, None, word, inside[:, None], 0, S, 0, N)
        if S < G:
            x = _far(x, N, S, T)
        if 2 * S < G:
            x = _far(x, N, S, 2 * T)
        x = x * FACTOR
    else:
        x = tl.load(x_ptr + origin + tl.arange(0, S)[None, :] * step, mask=inside[:, None], other=0.0).to(tl.float32)
    return x, place, inside


# `rows` unspecialised: across memory a lane reads its own group's values, and not eight of neighbours' at once
@triton.jit(do_not_specialize=["signs_side", "rows"])
def _rotate(
    x_ptr, state_ptr, y_ptr, partial_ptr, signs_side, rows, columns, tiles,
    ACROSS: tl.constexpr, ROTATED: tl.constexpr, FACTOR: tl.constexpr, G: tl.constexpr, S: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """y: x rotated; each program's largest magnitude, as bits, so that NaN is on top, if there is a partial_ptr."""
    low, high = _signs(state_ptr, signs_side, G)
    largest = tl.zeros([T * G // S], tl.int32)
    for i in range(tl.program_id(0), tiles, tl.num_programs(0)):
        y, place, inside = _tile(
            x_ptr, low, high, tl.cast(i, tl.int64), rows, columns, ACROSS, ROTATED, FACTOR, G, S, T
        )
        tl.store(y_ptr + place[:, None] + tl.arange(0, S)[None, :], y, mask=inside[:, None])
        if partial_ptr is not None:
            largest = tl.maximum(largest, tl.max(float_bits(y) & 0x7FFFFFFF, axis=1))
    if partial_ptr is not None:
        tl.store(partial_ptr + tl.program_id(0), tl.max(largest, axis=0))


@triton.jit
def _sum(x_NB, NB: tl.constexpr):
    """(NB,) sums of blocks of 16, neighbours first. Every value of a block gets the sum, as in a rotation: layouts stay
    what they are.
    """
    x = tl.reshape(x_NB, (NB * 16,))
    for stage in tl.static_range(0, 4):
        a, b = tl.split(tl.permute(tl.reshape(x, (NB * 16 >> (stage + 1), 2, 1 << stage)), (0, 2, 1)))
        x = tl.reshape(tl.permute(tl.join(a + b, a + b), (0, 2, 1)), (NB * 16,))
    return tl.max(tl.reshape(x, (NB, 16)), axis=1)


@triton.jit
def _in_whole(i, first, run, stride):
    """Return where row, or column, i of a part lies: `formats.random.Span`."""
    return first + i // run * stride + i % run


_PLACE = ["row_first", "row_run", "row_stride", "first", "run", "stride", "width"]


@triton.jit(do_not_specialize=["side", "signs_side", "rows", *_PLACE])
def _draw(
    x_ptr, state_ptr, partial_ptr, given_ptr, codes_ptr, scale_ptr, outer_ptr, values_ptr, side, signs_side, rows, columns,
    row_first, row_run, row_stride, first, run, stride, width, PLACED: tl.constexpr,
    ACROSS: tl.constexpr, ROTATED: tl.constexpr, FACTOR: tl.constexpr, G: tl.constexpr, S: tl.constexpr, T: tl.constexpr,
    KIND: tl.constexpr, PTS_RECIPROCAL: tl.constexpr, RECIPROCAL: tl.constexpr, LEAST: tl.constexpr, SMALLEST_PTS: tl.constexpr,
    NORMAL: tl.constexpr, THIRDS: tl.constexpr, N_PARTIALS: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """KIND: "mxfp4-sr", "nvfp4-sr" or "ms-eden". Parts are blocks, S = B. given_ptr: the outer scale, if it is known.

    row_*, first, run, stride, width: the matrix's place in the whole one, if PLACED.
    """
    low, high = _signs(state_ptr, signs_side, G) if ROTATED else (None, None)
    tile = tl.program_id(0).to(tl.int64)
    x, place, inside = _tile(x_ptr, low, high, tile, rows, columns, ACROSS, ROTATED, FACTOR, G, S, T)
    NB: tl.constexpr = T * G // S
    block = place // B
    place = block * B
    counter = place
    if PLACED:
        row = _in_whole(place // columns, row_first, row_run, row_stride)
        counter = (row * width + _in_whole(place % columns, first, run, stride)) // B * B
    bits = float_bits(x)
    magnitude = bits & 0x7FFFFFFF
    amax = tl.max(magnitude, axis=1)
    if KIND == "mxfp4-sr":
        byte = e8m0_byte(amax, "floor", 2, 1.0, 1)
        inverse, scale_value, stored = e8m0_inverse(byte, "floor"), e8m0_value(byte), byte.to(tl.uint8)
        outer = tl.full([], THIRDS, tl.float32)
        y = bits_float(magnitude) * 0.75 * inverse[:, None]
    else:
        if given_ptr is not None:
            outer = tl.load(given_ptr)
        else:
            largest = tl.max(tl.load(partial_ptr + tl.arange(0, N_PARTIALS)), axis=0)
            outer = most(bits_float(largest) * PTS_RECIPROCAL, SMALLEST_PTS)
        scale, inverse = safe_scale(amax, outer, tl.div_rn(tl.full([], 1.0, tl.float32), outer), RECIPROCAL, LEAST)
        scale_value = scale.to(tl.float32)
        stored = scale.to(tl.uint8, bitcast=True)
        y = bits_float(magnitude) * inverse[:, None]

    if KIND == "ms-eden":
        nearest = e2m1_rounded(y)
        kept = _sum(y * e2m1_value(nearest, E2M1_UNIT), NB)
        length = _sum(y * y, NB)
        grown = scale_value * tl.where(kept == 0.0, 1.0, tl.div_rn(length, kept))
        step = bits_float(float_bits(most(grown, NORMAL)) & 0x7F800000) * 0.125
        t = tl.div_rn(grown, step)
        down = tl.floor(t)
        drawn = counter // B
        w0, w1, w2, w3 = philox(philox_key(state_ptr, side), drawn // 4)
        word = tl.where(drawn % 2 == 0, tl.where(drawn % 4 == 0, w0, w2), tl.where(drawn % 4 == 1, w1, w3))
        u = uniform(word.to(tl.int32, bitcast=True))
        rounded = least((down + (u < t - down).to(tl.float32)) * step, 448.0).to(tl.float8e4nv)
        scale_value = rounded.to(tl.float32)
        stored = rounded.to(tl.uint8, bitcast=True)
    else:
        steps, p = e2m1_drawn(y, words(philox_key(state_ptr, side), counter, NB, B))
        nearest = bits_float(steps + ((p - (127 << 23)) >> 22) + E2M1_BASE_BITS)

    sign = e2m1_sign(bits, magnitude)
    codes = tl.where((inverse == inverse)[:, None], e2m1_code(nearest, sign), 0)  # NaN has no code, and no sign
    word = (block * (B // 8))[:, None] + tl.arange(0, B // 8)[None, :]
    store4(codes_ptr, word, codes, inside[:, None], NB, B)
    tl.store(scale_ptr + block, stored, mask=inside)
    at = place[:, None] + tl.arange(0, B)[None, :]
    value = e2m1_value(nearest, sign) * scale_value[:, None]
    tl.store(values_ptr + at, value.to(values_ptr.dtype.element_ty), mask=inside[:, None])
    if tl.program_id(0) == 0:
        tl.store(outer_ptr, outer)


def _tiling(rows: int, columns: int, across: bool, size: int, part: int) -> tuple[int, dict[str, Any]]:
    """(number of tiles, arguments that say how a kernel goes through (rows, columns)). size: of the rotation, or 0;
    part: values of a lane.
    """
    group = size or part
    warps = max(2, group // part) if size else 1  # a part for each lane, and 32 groups side by side
    t = WARP * warps * part // group if size else TILE // part
    tiles = triton.cdiv(rows, t) * (columns // group) if across else triton.cdiv(rows * columns // group, t)
    how = {"ACROSS": across, "ROTATED": size > 0, "FACTOR": size**-0.5 if size else 1.0, "G": group, "S": part, "T": t}
    return tiles, {"rows": rows, "columns": columns, **how, **LAUNCH | {"num_warps": warps}}


def _rotated(x_RK: Tensor, across: bool, size: int, random: Random, partials: Tensor | None) -> Tensor:
    """(R, K) float32: x_RK rotated; partials: for maxima of the bits of its magnitudes."""
    y = torch.empty(x_RK.shape, dtype=torch.float32, device=x_RK.device)
    _rotation(*x_RK.shape, across, size, random.side, partials is None)(x_RK, random.state, y, partials)
    return y


@lru_cache(LAUNCHES)
def _rotation(rows: int, k: int, across: bool, size: int, side: int, alone: bool) -> Launch:
    tiles, how = _tiling(rows, k, across, size, min(size, PART))
    return Launch(_rotate, (tiles if alone else PARTIALS,), signs_side=SIGNS + side // 2, tiles=tiles, **how)


def rotate(operand: Operand, x_RK: Tensor, random: Random) -> Tensor:
    """x_RK rotated as `operand` does: for a format that is not of this file."""
    assert operand.transform is not None
    return _rotated(*memory(x_RK), operand.transform.size, random, None)


def _where(place: Place | None) -> dict[str, int | bool]:
    """The arguments that say where a matrix lies in the whole one."""
    rows, columns = place or (Span(0, 0), Span(0, 0))
    all_of_it = 1 << 62  # one run, longer than any matrix
    return {
        "row_first": rows.first, "row_run": rows.run or all_of_it, "row_stride": rows.stride,
        "first": columns.first, "run": columns.run or all_of_it, "stride": columns.stride,
        "width": columns.size, "PLACED": place is not None,
    }  # fmt: skip


def draw(operand: Operand, x_RK: Tensor, ask: Ask) -> Side:
    """Codes of x_RK, as `operand.encode(x_RK, random=ask.random)` makes them, and the operand in `ask.values`.

    ask.measured: the outer scale (1, 1) of the whole, where x_RK is a part.
    """
    size, inner, random = 0 if operand.transform is None else operand.transform.size, operand.format, ask.random
    assert inner.block is not None and random is not None
    made, (x_RK, across) = Outputs.of(inner, x_RK, ask._replace(codes=True)), memory(x_RK)
    outer, partials = torch.empty(1, 1, dtype=torch.float32, device=x_RK.device), None
    scaled = inner.block_scale != torch.float8_e8m0fnu
    if scaled and ask.measured is None:
        partials = (
            torch.empty(PARTIALS, dtype=torch.int32, device=x_RK.device)
            if size
            else absmax_partials(x_RK.t() if across else x_RK)
        )
    if size and (scaled or size < inner.block):
        x_RK, across, size = _rotated(x_RK, across, size, random, partials), False, 0
    launch = _drawing(inner, *x_RK.shape, across, size, random.side, random.place)
    launch(x_RK, random.state, partials, ask.measured if scaled else None, made.codes, made.scale, outer, made.values)
    return made.side(inner, outer, outer)


@lru_cache(LAUNCHES)
def _drawing(inner: Any, rows: int, k: int, across: bool, size: int, side: int, place: Place | None) -> Launch:
    tiles, how = _tiling(rows, k, across, size, inner.block)
    return Launch(
        _draw, (tiles,), side=side, signs_side=SIGNS + side // 2, **_where(place), KIND=inner.name,
        PTS_RECIPROCAL=reciprocal(inner.largest * inner.top_scale), RECIPROCAL=reciprocal(inner.largest), LEAST=inner.least,
        SMALLEST_PTS=8 * PTS_FLOOR, NORMAL=E4M3_FLOOR, THIRDS=THIRDS, N_PARTIALS=PARTIALS, B=inner.block, **how,
    )  # fmt: skip
