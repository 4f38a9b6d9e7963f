"""Rounding on the device: the Triton counterparts of `formats.elements` and `formats.scales`.

Three things keep a kernel's bytes equal to the reference's. Every launch has `enable_fp_fusion=False`, so that no
multiply and add are contracted behind our back; division is `tl.div_rn`, IEEE, where the reference divides; and absmax
compares integers, because a positive float's bits sort like its value, with NaN on top, where a float maximum would
drop the NaN.

Rounding to nearest even is an addition: v + 2^23 has no bits left below 1, so the adder itself rounds. For e2m1, whose
step is 1/2, 1 and 2 in turn, the index of the nearest code is the least of three such roundings, rn(2v), rn(v) + 2 and
rn(v/2) + 4: index over value is a concave, piecewise linear function, and the pieces agree, ties included, where they
meet.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROUND = tl.constexpr(8388608.0)  # 2^23: floats above it are integers
E2M1_BASE = tl.constexpr(8389632.0)  # 2^23 + 2^10: of its bits + an index, the index is what is left 22 places higher
E2M1_BASE_BITS = tl.constexpr(0x4B000400)
ROUND_SIGNED = tl.constexpr(12582912.0)  # 1.5 * 2^23, for values of either sign below 2^22
E2M1_UNIT = tl.constexpr(2.0**126)
E2M1_ROUND = tl.constexpr(4194304.0)  # 2^22: floats from it to 2^23 are multiples of 1/2
NAN_BITS = tl.constexpr(0x7FC00000)
INF_BITS = tl.constexpr(0x7F800000)


@triton.jit
def float_bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def bits_float(b):
    return b.to(tl.float32, bitcast=True)


@triton.jit
def row_and_column(first, i, WIDTH: tl.constexpr):
    """Return row and column of values `first` (int64) + i (int32), where a row has WIDTH. One long division in all."""
    row = first // WIDTH
    column = (first - row * WIDTH).to(tl.int32) + i
    return row + column // WIDTH, column % WIDTH


@triton.jit
def least(a, b):
    """Minimum that keeps a NaN."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def most(a, b):
    """Maximum that keeps a NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def round_even(v):
    """float32 -> nearest integer, half to even, for |v| < 2^22; NaN stays."""
    return (v + ROUND_SIGNED) - ROUND_SIGNED


@triton.jit
def quotient(d, s, r):
    """d / s rounded to float32, given r = 1 / s rounded, for s in [2^-60, 2^60] and finite d; s is positive.

    Markstein's division: the first correction makes q faithful, and from a faithful q and a rounded reciprocal the
    second makes the rounded quotient (Markstein, "Computation of elementary functions on the IBM RISC System/6000",
    1990). A quotient below 2^-20 s may lose last bits to underflow; every code is zero there. Hardware division does
    the same, with a reciprocal for each value.
    """
    q = d * r
    q = tl.fma(tl.fma(-s, q, d), r, q)
    q = tl.fma(tl.fma(-s, q, d), r, q)
    return bits_float(
        (float_bits(q) & 0x7FFFFFFF) | (float_bits(d) & -0x80000000)
    )  # the corrections of -0 add up to +0


@triton.jit
def through(v, DTYPE: tl.constexpr):
    """float32 rounded to DTYPE and back."""
    return v.to(DTYPE).to(tl.float32)


@triton.jit
def float8_code(y, LIMIT: tl.constexpr, ELEMENT: tl.constexpr):
    """float32 -> float8, saturated; NaN stays."""
    y = least(most(y, -LIMIT), LIMIT)
    return y.to(tl.float8e4nv) if ELEMENT == "e4m3" else y.to(tl.float8e5)


@triton.jit
def float8_nearest(y, ELEMENT: tl.constexpr):
    """float32 in float8's range -> the nearest float8, as float32; -0 stays. As `float8_code`, without a conversion.

    This is for a kernel that stores codes beside their values. In such a kernel ptxas 12.8 packs the codes of two
    conversions into one register, and then decodes half of the values from other bits. The function adds 1.5 * 2^k p to
    y, where p is the power of two in y. The sum has no bits left below p / 8, or p / 4, which is float8's step there.
    """
    least_normal = 2.0**-6 if ELEMENT == "e4m3" else 2.0**-14
    magic = 1.5 * 2.0**20 if ELEMENT == "e4m3" else 1.5 * 2.0**21
    p = bits_float(float_bits(tl.maximum(tl.abs(y), least_normal)) & INF_BITS)
    rounded = tl.fma(p, -magic, tl.fma(p, magic, y))
    return bits_float((float_bits(rounded) & 0x7FFFFFFF) | (float_bits(y) & -0x80000000))


@triton.jit
def float8_index(v, ELEMENT: tl.constexpr):
    """int32 code of a float32 that float8 has; wrong for NaN: its block masks it. Scaled so that float32's exponent
    is float8's.
    """
    scaled = bits_float(float_bits(v) & 0x7FFFFFFF) * (2.0**-120 if ELEMENT == "e4m3" else 2.0**-112)
    return (float_bits(scaled) >> (20 if ELEMENT == "e4m3" else 21)) | ((float_bits(v) >> 24) & 0x80)


@triton.jit
def e2m1_rounded(v):
    """v >= 0 -> E2M1_BASE + index of the nearest e2m1 magnitude; saturating. Wrong for NaN: its block masks it."""
    return bits_float(tl.minimum(float_bits(e2m1_within(v)), E2M1_BASE_BITS + 7))


@triton.jit
def e2m1_within(v):
    """As `e2m1_rounded`, for v < 7."""
    low, high = float_bits(tl.fma(v, 2.0, E2M1_BASE)), float_bits(tl.fma(v, 0.5, E2M1_BASE + 4.0))
    # positive floats sort as their bits do, and the hardware compares three integers at once
    return bits_float(tl.minimum(tl.minimum(low, float_bits(v + (E2M1_BASE + 2.0))), high))


@triton.jit
def e2m1_nearest(v):
    """v >= 0 -> the nearest e2m1 magnitude, as a value; saturating. Wrong for NaN: its block masks it.

    v + 2^22 p, p the power of two in max(v, 1), has no bits left below p / 2, the step of e2m1 there.
    """
    v = tl.minimum(v, 6.0)
    p = bits_float(float_bits(tl.maximum(v, 1.0)) & INF_BITS)
    return tl.fma(p, -E2M1_ROUND, tl.fma(p, E2M1_ROUND, v))


@triton.jit
def e2m1_sign(bits, magnitude):
    """Bits of float32, and without their signs -> the signs, as -E2M1_UNIT or E2M1_UNIT.

    Noise for a NaN, of which the hardware makes another where it takes the magnitude of a float.
    """
    return bits_float((bits ^ magnitude) | 0x7E800000)


@triton.jit
def e2m1_value(rounded, sign):
    """`e2m1_rounded` and `e2m1_sign` -> float32. An index is a float32's lowest exponent bits and first mantissa bit,
    2^126 too small.
    """
    return bits_float(float_bits(rounded) << 22) * sign


@triton.jit
def e2m1_decoded(top):
    """int32 whose highest four bits are a code -> float32. They are moved to where float32 has them, with copies of the
    sign in front.
    """
    return bits_float((top >> 6) & -0x7E400000) * E2M1_UNIT


@triton.jit
def e2m1_code(rounded, sign):
    """`e2m1_rounded` and `e2m1_sign` -> int32 codes, 0..15."""
    return float_bits(tl.fma(sign, -4.0 / E2M1_UNIT, rounded)) - (E2M1_BASE_BITS - 4)


@triton.jit
def e2m1_code_alone(rounded, bits):
    """`e2m1_rounded` and bits of float32 -> int32 codes, 0..15, in a kernel that writes no values.

    There the integers take a third fewer registers than `e2m1_sign` and `e2m1_code`; beside values they take more.
    """
    return (float_bits(rounded) & 7) | ((bits >> 28) & 8)


@triton.jit
def e8m0_byte(amax_bits, RULE: tl.constexpr, MAX_POW2: tl.constexpr, RECIPROCAL: tl.constexpr, MANTISSA: tl.constexpr):
    """Biased exponent of a block's scale, as `formats.scales.e8m0_bytes`. RECIPROCAL: float32 of 1 / largest value."""
    if RULE == "rceil":
        bits = float_bits(bits_float(amax_bits) * RECIPROCAL)
        exponent, mantissa = bits >> 23, bits & 0x7FFFFF
        up = tl.where(exponent == 0, mantissa > 1 << 22, mantissa > 0)
        byte = tl.minimum(exponent + up.to(tl.int32), 254)
    else:
        bits = amax_bits
        if RULE == "even":
            bits = bits + (1 << (22 - MANTISSA))
        exponent = (bits >> 23) & 0xFF
        if RULE == "ceil":
            exponent = exponent + ((bits & 0x7FFFFF) > 0).to(tl.int32)
        byte = tl.maximum(exponent - MAX_POW2, 0)
    return tl.where(amax_bits > INF_BITS, 255, byte)


@triton.jit
def e8m0_value(byte):
    """2^(byte - 127), NaN for 255."""
    bits = tl.where(byte == 0, 1 << 22, byte << 23)
    return bits_float(tl.where(byte == 255, NAN_BITS, bits))


@triton.jit
def e8m0_inverse(byte, RULE: tl.constexpr):
    """The factor of x: 2^(127 - byte), but for byte 0: 1 under rceil, 2^126 otherwise."""
    bits = tl.where(byte == 254, 1 << 22, (254 - byte) << 23)
    bits = tl.where(byte == 0, (127 if RULE == "rceil" else 253) << 23, bits)
    return bits_float(tl.where(byte == 255, NAN_BITS, bits))


@triton.jit
def te_factor(outer, LARGEST: tl.constexpr):
    """Return what TransformerEngine multiplies x by before it rounds: 2688 / outer, 1 for zeros."""
    one = tl.full([], 1.0, tl.float32)
    return tl.where(outer == 0.0, one, least(tl.div_rn(one * 2688.0, outer), LARGEST))


@triton.jit
def te_scale(amax_bits, factor, SIXTH: tl.constexpr, LARGEST: tl.constexpr):
    """amax of each block, or tile -> (e4m3 scale, what x is multiplied by)."""
    top = bits_float(tl.where(amax_bits == INF_BITS, NAN_BITS, amax_bits))
    scale = least(top * (factor * SIXTH), 448.0).to(tl.float8e4nv)
    step = scale.to(tl.float32)
    back = tl.div_rn(tl.full([], 1.0, tl.float32), factor)
    return scale, least(tl.div_rn(tl.zeros_like(step) + 1.0, step * back), LARGEST)


@triton.jit
def pack4(codes, NB: tl.constexpr, B: tl.constexpr):
    """(NB, B) int32 codes, 0..15 in their lowest four bits, the others 0 -> (NB, B / 2) int32, low nibble = even k."""
    low, high = tl.split(tl.reshape(codes, (NB, B // 2, 2)))
    return low | (high << 4)


@triton.jit
def store4(pointer, word, codes, mask, N: tl.constexpr, B: tl.constexpr):
    """Store (N, B) int32 codes, 0..15, as words of eight, the first code lowest: (N, B / 8) of them, at `word`."""
    words = tl.sum(tl.reshape(codes, (N, B // 8, 8)) << (4 * tl.arange(0, 8))[None, None, :], axis=2)
    tl.store(pointer.to(tl.pointer_type(tl.int32), bitcast=True) + word, words, mask=mask)


@triton.jit
def load_e2m1(pointer, word, mask, N: tl.constexpr, B: tl.constexpr):
    """(N, B) float32 of the e2m1 codes in (N, B / 8) words of eight, at `word`."""
    words = tl.load(pointer.to(tl.pointer_type(tl.int32), bitcast=True) + word, mask=mask, other=0)
    return tl.reshape(e2m1_decoded(words[:, :, None] << (28 - 4 * tl.arange(0, 8))[None, None, :]), (N, B))


@triton.jit
def unpack4(packed, NB: tl.constexpr, B: tl.constexpr):
    """Inverse of `pack4`: (NB, B / 2) uint8 -> (NB, B) int32, the code in the lowest four bits, noise above them."""
    both = packed.to(tl.int32)
    return tl.reshape(tl.join(both, both >> 4), (NB, B))
