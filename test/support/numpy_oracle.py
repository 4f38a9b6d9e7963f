"""What formats compute, written again in numpy from their definitions: float32 arithmetic is IEEE's, small floats are
ml_dtypes'.

Each function takes blocks (B, block) of bf16 values as float32 and gives (scale, codes) in the values that are stored,
codes as the numbers they stand for. No code is shared with aoquant or torch.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

F32, BF16 = np.float32, ml_dtypes.bfloat16
ELEMENT = {
    "e2m1": (ml_dtypes.float4_e2m1fn, 6.0, 2, 1),
    "e4m3": (ml_dtypes.float8_e4m3fn, 448.0, 8, 3),
    "e5m2": (ml_dtypes.float8_e5m2, 57344.0, 15, 2),
}
Arrays = tuple[np.ndarray, np.ndarray]


def element(y: np.ndarray, name: str) -> np.ndarray:
    """The nearest values of a small float, half to even, saturating."""
    dtype, limit, *_ = ELEMENT[name]
    return np.clip(y, -limit, limit).astype(dtype).astype(F32)


def constant(x: np.ndarray, c: float) -> np.ndarray:
    """x / c, as a product with the float32 reciprocal."""
    return x * (F32(1) / F32(c))


def e8m0(amax: np.ndarray, name: str, rule: str) -> np.ndarray:
    """Biased exponents of finite magnitudes."""
    _, limit, top, bits = ELEMENT[name]
    if rule == "rceil":
        fraction, exponent = np.frexp(
            constant(amax, limit).astype(np.float64)
        )  # x = fraction * 2^exponent, .5 <= fraction < 1
        up = np.where(fraction == 0.5, exponent - 1, exponent)
        return np.where(amax == 0, 0, np.clip(up, -127, 127) + 127)
    if rule == "even":  # half an ulp of the element's mantissa on top: only a carry into the exponent matters
        fraction, exponent = np.frexp(amax.astype(np.float64))
        exponent = exponent + (fraction >= 1 - 2.0 ** -(bits + 2))
    else:
        fraction, exponent = np.frexp(amax.astype(np.float64))
        exponent = exponent + ((rule == "ceil") & (fraction > 0.5))
    byte = np.clip(exponent - 1 - top + 127, 0, 255)
    return np.where(amax < 2.0**-126, 0, byte)


def mx(x: np.ndarray, name: str, rule: str) -> Arrays:
    byte = e8m0(np.abs(x).max(1), name, rule)
    power = 2.0 ** (127.0 - np.maximum(byte, 1)) if rule != "rceil" else np.where(byte == 0, 1.0, 2.0 ** (127.0 - byte))
    return byte, element((x.astype(np.float64) * power[:, None]).astype(F32), name)


def nvfp4(x: np.ndarray, pts: np.ndarray | None) -> Arrays:
    ratio = constant(np.abs(x).max(1), 6.0)
    if pts is not None:
        ratio = ratio / pts
    scale = np.clip(ratio, F32(2.0**-6), F32(448)).astype(ml_dtypes.float8_e4m3fn).astype(F32)
    inverse = (F32(1) if pts is None else F32(1) / pts) / scale
    return scale, element(x * inverse[:, None], "e2m1")


def float8(x: np.ndarray, name: str) -> Arrays:
    scale = constant(np.abs(x).max(1), ELEMENT[name][1]).astype(BF16).astype(F32)
    codes = element(x / np.where(scale == 0, F32(1), scale)[:, None], name)
    return scale, np.where(scale[:, None] == 0, F32(0), codes)


def affine(x: np.ndarray, bits: int, mapping: str, wide: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(scale, zero point, codes). wide: quantised in float32, with float32's eps; otherwise every step is rounded to
    bf16.
    """
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    eps = F32(np.finfo(F32).eps if wide else 2.0**-126)

    def rn(v: np.ndarray) -> np.ndarray:
        return v.astype(BF16).astype(F32)

    smallest, largest = np.minimum(x.min(1), 0), np.maximum(x.max(1), 0)
    if mapping == "symmetric":
        scale = np.maximum(rn(constant(np.maximum(-smallest, largest), (high - low) / 2)), eps)
        zero = np.zeros_like(scale)
    else:
        scale = np.maximum(rn(constant(rn(largest - smallest), high - low)), eps)
        zero = np.clip(low - np.rint(rn(smallest / scale)), low, high)
    inverse = F32(1) / scale
    quotient = x * inverse[:, None] if wide else rn(x * rn(inverse)[:, None])
    return scale, zero, np.clip(np.rint(quotient) + zero[:, None], low, high)


def int4(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(scale, zero, codes) of MSLK's asymmetric int4, bf16 scales."""
    low, high = x.min(1), x.max(1)
    scale = constant(np.maximum(high - low, F32(1e-6)), 15.0)
    zero = low + F32(8) * scale
    codes = np.clip(np.rint((x - low[:, None]) / scale[:, None]), 0, 15) - 8
    return scale.astype(BF16).astype(F32), zero.astype(BF16).astype(F32), codes


def equal(got: np.ndarray, want: np.ndarray) -> bool:
    """Return whether numbers are equal, with equal signs of zero."""
    return bool((got == want).all() and (np.signbit(got) == np.signbit(want)).all())
