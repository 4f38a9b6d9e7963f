"""Four-over-six and GridFlip written again, from their definition, in numpy: one block after the other, no code shared
with aoquant.

float32 arithmetic is IEEE's, one rounding an operation; small floats are ml_dtypes'. `encode` takes float32 values, and
gives what is
stored: t, scale bytes and codes.
"""

from __future__ import annotations

from typing import NamedTuple

import ml_dtypes
import numpy as np

F32 = np.float32
FP4, FP8 = ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e4m3fn
EVERY_SCALE = np.arange(127, dtype=np.uint8).view(FP8).astype(F32)


class Stored(NamedTuple):
    t: np.float32
    scales: np.ndarray  # uint8 (R / tile, G)
    codes: np.ndarray  # uint8 (R, K)


def e4m3(x: float) -> np.float32:
    """The nearest of all scales, half to even, saturating: looked up, not cast."""
    return F32(min(F32(x), F32(448)).astype(FP8)) if np.isfinite(x) else F32(448)


def e2m1(y: np.ndarray) -> np.ndarray:
    return np.clip(y, F32(-6), F32(6)).astype(FP4)


def outer(x: np.ndarray) -> tuple[np.float32, np.float32, np.float32]:
    """(t, amax and the power of two of the tensor that blocks are compared in)."""
    finite = np.abs(x[np.isfinite(x)])
    amax = F32(finite.max()) if finite.size else F32(0)
    if amax == 0:
        return F32(1), F32(1536), F32(1)
    amax = max(amax, F32(2.0**-133))
    t = F32(amax / F32(1536))
    power = F32(1)
    if not 2.0**-60 <= amax <= 2.0**60:
        # any power that brings it back will do; small ones in float64, since 2^133 is no float32
        power = 2.0 ** -np.floor(np.log2(float(amax)))
    return t, F32(float(amax) * power), power


def candidates(block: np.ndarray, amax: np.float32, effort: str, c: np.float32) -> list[tuple[np.float32, bool]]:
    """(unsigned scale, flipped), in order. effort "none": four-over-six. c is negative where the shift's sign is
    turned.
    """
    top = F32(F32(1536) / amax)
    a, size = F32(np.abs(block).max()), abs(c)
    b = F32(F32(a / F32(6)) * top)
    six, four = e4m3(b), e4m3(F32(F32(1.5) * b))
    if effort == "search":
        middle = int(np.searchsorted(EVERY_SCALE, six))
        codes = [min(max(middle + d, 0), 126) for d in range(-4, 9)]
        return [(EVERY_SCALE[i], flipped) for flipped in (False, True) for i in codes]
    found = [(six, False), (four, False)]
    if effort == "none":
        return found
    found += [(e4m3(F32(F32(a / F32(F32(v) + size)) * top)), True) for v in (6, 4)]
    if effort == "sided":
        pos, neg = F32(max(block.max(), 0)), F32(max((-block).max(), 0))
        short, long = (neg, pos) if c < 0 else (pos, neg)
        for v in (6, 4):
            one = F32(F32(short / F32(F32(v) - size)) * top)
            two = F32(F32(long / F32(F32(v) + size)) * top)
            found.append((e4m3(max(one, two)), True))
    return found


def attempt(
    block: np.ndarray, amax: np.float32, s: np.float32, flipped: bool, c: np.float32, metric: str
) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """(codes, values before t, error) of one candidate."""
    top = F32(F32(1536) / amax)
    denominator = F32(s * F32(F32(1) / top))
    inverse = F32(3.4028234663852886e38) if denominator == 0 else min(F32(1) / denominator, F32(3.4028234663852886e38))
    y = block * F32(inverse)
    code = e2m1(-y - c if flipped else y)
    signed = F32(-s) if flipped and s > 0 else s
    values = signed * code.astype(F32)
    if flipped:
        values = values + c * min(signed, F32(0))
    d = values * amax / F32(1536) - block  # float32 arrays: each operation rounds
    if metric == "absmax":
        error = np.fmax.reduce(np.abs(d))
    else:
        error = np.add.accumulate(d * d if metric == "mse" else np.abs(d))[-1]  # one after the other
    return code.view(np.uint8) & 15, values, error


@np.errstate(all="ignore")
def encode(
    x: np.ndarray,
    effort: str = "none",
    *,
    c: float = 0.25,
    metric: str = "mse",
    alternating: bool = False,
    tile: int = 1,
    amax: float | None = None,
) -> Stored:
    x = x.astype(F32)
    t, reach, power = outer(x if amax is None else np.array([amax], F32))
    rows, groups = -(-x.shape[0] // tile), x.shape[1] // 16
    scales, codes = np.zeros((rows, groups), np.uint8), np.zeros(x.shape, np.uint8)
    for r in range(rows):
        for g in range(groups):
            here = np.s_[r * tile : (r + 1) * tile, g * 16 : g * 16 + 16]
            raw = x[here].flatten()
            if not np.isfinite(raw).all():
                scales[r, g] = 0x7F
                continue
            block = (raw.astype(np.float64) * power).astype(F32)
            shift = F32(-c if alternating and g % 2 else c)
            best = None
            for s, flipped in candidates(block, reach, effort, shift):
                code, values, error = attempt(block, reach, s, flipped, shift, metric)
                overflows = best is not None and not np.isfinite(F32(np.abs(values).max() * t))
                if best is None or (error < best[0] and not overflows):
                    best = error, s, flipped, code
            assert best is not None
            _, s, flipped, code = best
            scales[r, g] = np.array([s]).astype(FP8).view(np.uint8)[0] | (0x80 if flipped and s > 0 else 0)
            codes[here] = code.reshape(x[here].shape)
    return Stored(t, scales, codes)
