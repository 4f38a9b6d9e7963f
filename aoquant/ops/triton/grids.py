"""Four-over-six and GridFlip: encode, and decode with the sign of the scale that marks a shifted grid.

The encoder is that of `csrc/contest.cuh`, whose essay and proof hold here too. It compares candidates by a rough error,
seven instructions for each value. Where two candidates are closer than the rough error's margin, it takes the exact
error of `formats/contest.py`. The exact error is a sum in order, but Triton adds along an axis in whatever order suits
the layout. So the exact sum takes one column after the other.

It serves installs without the library of csrc. The library is faster: a thread there holds a whole block, and here two
threads share one.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from aoquant.formats import Encoded, FourOverSix, Operand
from aoquant.formats.contest import AMAX_FLOOR, TOP
from aoquant.formats.elements import FLOAT32_MAX
from aoquant.formats.scales import float32, reciprocal

from ..native import aligned
from ..quantized import Ask, Side
from .amax_kernels import PARTIALS, absmax_partials, row_absmax
from .blockscaled_kernels import Outputs
from .element_codes import (
    INF_BITS,
    bits_float,
    e2m1_code,
    e2m1_rounded,
    e2m1_sign,
    e2m1_value,
    float_bits,
    load_e2m1,
    quotient,
    row_and_column,
    store4,
)
from .launch import LAUNCHES, Launch

TILE = 512
LAUNCH: dict[str, Any] = {"enable_fp_fusion": False, "num_warps": 1}
_EFFORTS = {"": 0, "base": 1, "sided": 2, "search": 3}
KAPPA, FLOOR = tl.constexpr(5.2e-5), tl.constexpr(1.3e-5)  # as csrc/contest.cuh proves
STEP = tl.constexpr(6291456.0)  # 1.5 * 2^22: E * STEP has half of E for a unit in the last place, whatever E = 2^e
LARGE = tl.constexpr(2.0**100)
SIXTH, SIXTH_REST = tl.constexpr(reciprocal(6.0)), tl.constexpr(1.0 / 6.0 - reciprocal(6.0))
TOP_RECIPROCAL, TOP_REST = tl.constexpr(reciprocal(TOP)), tl.constexpr(1.0 / TOP - reciprocal(TOP))
MOST = tl.constexpr(FLOAT32_MAX)
AMAX_LEAST = tl.constexpr(struct.unpack("i", struct.pack("f", AMAX_FLOOR))[0])  # its bits


@triton.jit
def _e4m3(ratio):
    return tl.minimum(ratio, 448.0).to(tl.float8e4nv).to(tl.float32)


@triton.jit
def _inverse(s, down):
    return tl.minimum(tl.div_rn(tl.full(s.shape, 1.0, tl.float32), s * down), MOST)


@triton.jit
def _nearest(magnitude):
    """|z| -> the nearest e2m1 magnitude, half to even, saturating."""
    v = tl.minimum(magnitude, 6.0)
    e = tl.maximum(bits_float(float_bits(v) & INF_BITS), 1.0)
    return tl.fma(e, -STEP, tl.fma(e, STEP, v))


@triton.jit
def _ratio(a, v, r, up):
    """a / v * T."""
    return quotient(a, v + tl.zeros_like(a), r) * up


@triton.jit
def _scale(i: tl.constexpr, b, a, pos, neg, up, v6, r6, v4, r4, p6, q6, p4, q4):
    """Unsigned scale of candidate i of "base" and "sided", and of four-over-six."""
    if i == 0:
        ratio = b
    elif i == 1:
        ratio = b * 1.5
    elif i == 2:
        ratio = _ratio(a, v6, r6, up)
    elif i == 3:
        ratio = _ratio(a, v4, r4, up)
    elif i == 4:
        ratio = tl.maximum(_ratio(pos, p6, q6, up), _ratio(neg, v6, r6, up))
    else:
        ratio = tl.maximum(_ratio(pos, p4, q4, up), _ratio(neg, v4, r4, up))
    return _e4m3(ratio)


@triton.jit
def _searched(i, middle):
    """Scale of candidate i % 13 of a search around e4m3 code `middle`."""
    code = tl.minimum(tl.maximum(middle + i % 13 - 4, 0), 126)
    return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def _rough(x, s, c, down, FLIPPED: tl.constexpr):
    """Error of a candidate, rough, in units of amax / 1536; FLIPPED is 0 or 1, or a scalar of the two."""
    inverse = _inverse(s, down)
    z = tl.abs(tl.fma(x, (inverse * (1 - 2 * FLIPPED))[:, None], (-c * FLIPPED)[:, None] + tl.zeros_like(x)))
    e = tl.maximum(bits_float(float_bits(z) & INF_BITS), 1.0)
    d = tl.minimum(tl.fma(e, -STEP, tl.fma(e, STEP, z)), 6.0) - z
    return tl.sum(d * d, axis=1) * (s * s)


@triton.jit
def _outer(largest):
    """(amax, up, down, t, power) of `contest.Outer`, of one absmax or of several."""
    largest = tl.where(largest == 0.0, 1536.0, bits_float(tl.maximum(float_bits(largest), AMAX_LEAST)))
    top = tl.zeros_like(largest) + 1536.0
    t = tl.div_rn(largest, top)
    power = tl.where(largest < 2.0**-60, 2.0**100, tl.where(largest > 2.0**60, 2.0**-100, 1.0))
    amax = largest * power
    up = tl.div_rn(top, amax)
    return amax, up, tl.div_rn(tl.zeros_like(largest) + 1.0, up), t, power


@triton.jit
def _beside(v, EACH: tl.constexpr):
    """Return one number for each block, EACH, as a column beside the block's values; or one number for all."""
    return v[:, None] if EACH else v


@triton.jit
def _exact(x, s, c, down, amax, FLIPPED, EACH: tl.constexpr, NB: tl.constexpr, B: tl.constexpr):
    """(error, largest decoded magnitude without t) of a candidate, as `contest.Contest`."""
    y = x * _inverse(s, down)[:, None]
    z = tl.where(FLIPPED, -y - c[:, None], y)
    q = bits_float(float_bits(_nearest(tl.abs(z))) | (float_bits(z) & -0x80000000))
    signed = tl.where(FLIPPED, -s, s)
    v = q * signed[:, None]
    v = v + tl.where(FLIPPED, c * signed, 0.0)[:, None]
    p = v * _beside(amax, EACH)
    d = tl.fma(p, TOP_RECIPROCAL, p * TOP_REST) - x
    squares = d * d
    k = tl.arange(0, B)[None, :]
    total = tl.zeros([NB], tl.float32)
    for i in range(B):  # one value and zeros add up to the value in any order
        total = total + tl.sum(tl.where(k == i, squares, 0.0), axis=1)
    return total, tl.max(tl.abs(v), axis=1)


@triton.jit
def _encode(
    x_ptr, partial_ptr, codes_ptr, scale_ptr, outer_ptr, values_ptr, n_blocks, groups, known, shift,
    v6, r6, v4, r4, p6, q6, p4, q4,
    EFFORT: tl.constexpr, ALTERNATING: tl.constexpr, ROUGH: tl.constexpr, ROWS: tl.constexpr, CODES: tl.constexpr, VALUES: tl.constexpr,
    NB: tl.constexpr, B: tl.constexpr, N_PARTIALS: tl.constexpr,
):  # fmt: skip
    """EFFORT: 0 four-over-six, 1 base, 2 sided, 3 search. VALUES: "" none, "operand" without, "decode" with the outer
    scale.

    partial_ptr: bits of the absmax in parts; or, with ROWS, of each row's; or None, where it is `known`.
    """
    if not ROWS:
        if partial_ptr is None:
            largest = known + tl.zeros([], tl.float32)
        else:
            largest = bits_float(tl.max(tl.load(partial_ptr + tl.arange(0, N_PARTIALS)), axis=0))
        amax, up, down, t, power = _outer(largest)
        if tl.program_id(0) == 0:
            tl.store(outer_ptr, t)
    N: tl.constexpr = 26 if EFFORT == 3 else 2 * EFFORT + 2

    n_tiles = tl.cdiv(n_blocks, NB)
    for tile_index in range(tl.program_id(0), n_tiles, tl.num_programs(0)):
        tile = tl.cast(n_tiles - 1 - tile_index, tl.int64)
        block = tile * NB + tl.arange(0, NB)
        at = (tile * (NB * B)) + (tl.arange(0, NB)[:, None] * B + tl.arange(0, B)[None, :])
        inside = (block < n_blocks)[:, None]
        raw = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        bits = tl.max(float_bits(raw) & 0x7FFFFFFF, axis=1)
        finite = bits < INF_BITS
        if ROWS:
            row = block // groups
            largest = bits_float(tl.load(partial_ptr + row, mask=block < n_blocks, other=0))
            amax, up, down, t, power = _outer(largest)
            tl.store(outer_ptr + row, t, mask=(block < n_blocks) & (block % groups == 0))
        fair = tl.where(amax >= 2.0**-44, 1, 0) & tl.where(t < 2.0**100, 1, 0) & (1 if ROUGH else 0)  # for rough errors
        x = raw * _beside(power, ROWS)
        a = tl.where(finite, tl.minimum(tl.abs(bits_float(bits) * power), LARGE), 0.0)
        c = shift + tl.zeros([NB], tl.float32)
        if ALTERNATING:
            c = tl.where((block % groups) % 2 == 0, c, -c)
        pos, neg = a, a
        if EFFORT == 2:
            pos = tl.minimum(tl.maximum(tl.max(x, axis=1), 0.0), LARGE)
            neg = tl.minimum(tl.maximum(tl.max(-x, axis=1), 0.0), LARGE)
            if ALTERNATING:
                turned = c < 0
                pos, neg = tl.where(turned, neg, pos), tl.where(turned, pos, neg)
        b = tl.fma(a, SIXTH, a * SIXTH_REST) * up
        middle = tl.minimum(b, 448.0).to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)

        # the rough contest
        best = tl.full([NB], float("inf"), tl.float32)
        second, biggest = best, tl.zeros([NB], tl.float32)
        smallest = best
        won = tl.zeros([NB], tl.float32)  # signed scale
        if EFFORT == 3:
            last = tl.full([NB], -1.0, tl.float32)
            for m in range(N):
                s = _searched(m, middle)
                flipped = tl.where(m >= 13, 1.0, 0.0)
                e = _rough(x, s, c, down, flipped)
                e = tl.where(s == last, float("inf"), e)  # clamped: the same candidate again
                last = tl.where(m == 12, -1.0, s)
                second = tl.minimum(second, tl.maximum(best, e))
                won = tl.where(e < best, s * (1.0 - 2.0 * flipped), won)
                best = tl.minimum(best, e)
                biggest, smallest = tl.maximum(biggest, s), tl.minimum(smallest, s)
        else:
            for i in tl.static_range(N):
                s = _scale(i, b, a, pos, neg, up, v6, r6, v4, r4, p6, q6, p4, q4)
                error = _rough(x, s, c, down, 1 if i >= 2 else 0)
                second = tl.minimum(second, tl.maximum(best, error))
                won = tl.where(error < best, -s if i >= 2 else s, won)
                best = tl.minimum(best, error)
                biggest, smallest = tl.maximum(biggest, s), tl.minimum(smallest, s)
        floor = FLOOR * biggest * biggest
        sure = second * (1.0 - KAPPA) - floor > best * (1.0 + KAPPA) + floor
        ordinary = tl.where(smallest >= 2.0**-6, 1, 0) & tl.where(middle <= 0x7D, 1, 0)
        sure = tl.where(sure, ordinary, 0) & fair
        won = tl.where(a > 0.0, won, 0.0)  # a is 0 for blocks that are not finite, too
        close = tl.where(a > 0.0, 1 - sure, 0)

        if tl.max(close, axis=0) > 0:
            least = tl.zeros([NB], tl.float32)
            winner = won
            for n in range(N):
                if EFFORT == 3:
                    u = _searched(n, middle)
                    flips = n >= 13
                else:
                    u = _scale(0, b, a, pos, neg, up, v6, r6, v4, r4, p6, q6, p4, q4)
                    for j in tl.static_range(1, N):
                        u = tl.where(n == j, _scale(j, b, a, pos, neg, up, v6, r6, v4, r4, p6, q6, p4, q4), u)
                    flips = n >= 2
                error, most = _exact(x, u, c, down, amax, flips, ROWS, NB, B)
                better = (n == 0) | ((error < least) & (most * t < float("inf")))
                least = tl.where(better, error, least)
                winner = tl.where(better, tl.where(flips & (u > 0), -u, u), winner)
            won = tl.where(close != 0, winner, won)

        scale = tl.abs(won)
        flagged = won < 0
        y = x * _inverse(scale, down)[:, None]
        z = tl.where(flagged[:, None], -y - c[:, None], y)
        magnitude = tl.abs(z)
        rounded, sign = e2m1_rounded(magnitude), e2m1_sign(float_bits(z), float_bits(magnitude))
        if CODES:
            word = (tile * (NB * B // 8)) + (tl.arange(0, NB)[:, None] * (B // 8) + tl.arange(0, B // 8)[None, :])
            store4(codes_ptr, word, tl.where(finite[:, None], e2m1_code(rounded, sign), 0), inside, NB, B)
            byte = won.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
            tl.store(scale_ptr + block, tl.where(finite, byte, 0x7F).to(tl.uint8), mask=block < n_blocks)
        if VALUES != "":
            signed = tl.where(finite, won, float("nan"))
            value = e2m1_value(rounded, sign) * signed[:, None]
            if EFFORT > 0:
                value = value + (c * tl.where(flagged, signed, 0.0))[:, None]
            if VALUES == "decode":
                value = value * _beside(t, ROWS)
            tl.store(values_ptr + at, value.to(values_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _decode(
    codes_ptr, scale_ptr, outer_ptr, values_ptr, n_blocks, shift, GROUPS: tl.constexpr, OUTER: tl.constexpr,
    TILE_ROWS: tl.constexpr, FLIPS: tl.constexpr, ALTERNATING: tl.constexpr, NB: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Decode NB blocks. OUTER: whether outer scales multiply the values: one in all ("one") or one a row ("row"); or
    "".
    """
    tile = tl.program_id(0).to(tl.int64)
    block = tile * NB + tl.arange(0, NB)
    inside = block < n_blocks
    row, group = row_and_column(tile * NB, tl.arange(0, NB), GROUPS)
    at = (tile * (NB * B)) + (tl.arange(0, NB)[:, None] * B + tl.arange(0, B)[None, :])
    word = (tile * (NB * B // 8)) + (tl.arange(0, NB)[:, None] * (B // 8) + tl.arange(0, B // 8)[None, :])
    which = block if TILE_ROWS == 1 else row // TILE_ROWS * GROUPS + group
    signed = tl.load(scale_ptr + which, mask=inside, other=0).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    value = load_e2m1(codes_ptr, word, inside[:, None], NB, B) * signed[:, None]
    if FLIPS:
        c = shift + tl.zeros([NB], tl.float32)
        if ALTERNATING:
            c = tl.where(group % 2 == 0, c, -c)
        value = value + (c * tl.where(signed < 0, signed, 0.0))[:, None]
    if OUTER == "one":
        value = value * tl.load(outer_ptr)
    elif OUTER == "row":
        value = value * tl.load(outer_ptr + row, mask=inside, other=0.0)[:, None]
    tl.store(values_ptr + at, value.to(values_ptr.dtype.element_ty), mask=inside[:, None])


@lru_cache(LAUNCHES)
def _encoder(format: FourOverSix, rows: int, k: int, codes: bool, values: str) -> Launch:
    even, odd = format.shifts
    c = float32(even)
    tops = dict[str, float]()
    for names, top in (("v6 r6", 6 + c), ("v4 r4", 4 + c), ("p6 q6", 6 - c), ("p4 q4", 4 - c)):
        tops |= dict(zip(names.split(), (float32(top), reciprocal(float32(top))), strict=True))
    return Launch(
        _encode, (triton.cdiv(rows * k, TILE),), n_blocks=rows * k // 16, groups=k // 16,
        known=format.fixed[0] if format.fixed else 0.0, shift=c, **tops, EFFORT=_EFFORTS[format.effort],
        ALTERNATING=odd != even, ROUGH=c <= 0.29, ROWS=format.outer == "row", CODES=codes, VALUES=values,
        NB=TILE // format.block, B=format.block, N_PARTIALS=PARTIALS, **LAUNCH,
    )  # fmt: skip


@lru_cache(LAUNCHES)
def _decoder(format: FourOverSix, rows: int, k: int, outer: str) -> Launch:
    even, odd = format.shifts
    return Launch(
        _decode, (triton.cdiv(rows * k, TILE),), n_blocks=rows * k // 16, GROUPS=k // 16, OUTER=outer,
        shift=float32(even), TILE_ROWS=format.tile, FLIPS=even != 0, ALTERNATING=odd != even,
        NB=TILE // format.block, B=format.block, **LAUNCH,
    )  # fmt: skip


def encode(format: FourOverSix, x_RK: Tensor, ask: Ask, mix: Operand | None) -> Side:
    """Make what `ask` asks for of x_RK. mix: not used."""
    x_RK, by_row = x_RK.contiguous(), format.outer == "row"
    made = Outputs.of(format, x_RK, ask)
    outer = torch.empty(len(x_RK) if by_row else 1, 1, dtype=torch.float32, device=x_RK.device)
    found = None if format.fixed else (row_absmax if by_row else absmax_partials)(x_RK, finite=True)
    launch = _encoder(format, *x_RK.shape, ask.codes, ask.form)
    launch(x_RK, found, made.codes, made.scale, outer, made.values)
    return made.side(format, outer, outer)


def decode(format: FourOverSix, e: Encoded, dtype: torch.dtype, operand: bool) -> Tensor:
    """(R, K) values in `dtype`: the operand, or decoded."""
    assert e.outer is not None
    rows = e.codes.shape[0]
    values = torch.empty(rows, e.k, dtype=dtype, device=e.codes.device)
    codes, scale = aligned(e.codes), e.scales.contiguous().view(torch.uint8)
    outer = "" if operand else "row" if e.outer.shape[0] > 1 else "one"
    _decoder(format, rows, e.k, outer)(codes, scale, e.outer, values)
    return values
