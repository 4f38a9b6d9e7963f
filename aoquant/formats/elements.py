"""Elements: rounding a scaled value to the nearest code, and codes back to values.

e2m1 has the magnitudes 0 .5 1 1.5 2 3 4 6; the code is sign * 8 + index. Rounding is half to even, overflow saturates, and
-0.0 keeps its sign. float8 casts in eager PyTorch before 2.12 do not saturate, so every cast clamps first; NaN survives.
`fma_round` and `fma` are for kernels that fuse a multiplication and an addition into one rounding, which no PyTorch operation promises.
"""

from __future__ import annotations

import torch
from torch import Tensor

E2M1_MAX = 6.0
FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
# element -> (largest power of two, largest value, mantissa bits): the constants of the e8m0 rules
ELEMENTS = {"e2m1": (2, E2M1_MAX, 1), "e4m3": (8, 448.0, 3), "e5m2": (15, 57344.0, 2)}


def to_e2m1(x: Tensor) -> Tensor:
    """float32 -> uint8 codes 0..15, half to even, saturating. NaN has no code; the block's scale carries it."""
    v = x.abs()
    # one comparison a code: a tie goes to the even index, so every other boundary belongs to the code above it
    index = (v > 0.25).view(torch.uint8) + (v >= 0.75).view(torch.uint8) + (v > 1.25).view(torch.uint8)
    index += (v >= 1.75).view(torch.uint8)
    index += (v > 2.5).view(torch.uint8)
    index += (v >= 3.5).view(torch.uint8)
    index += (v > 5).view(torch.uint8)
    sign = torch.signbit(x) & ~x.isnan()  # a NaN made by arithmetic is negative on x86, positive on CUDA
    return index | (sign.view(torch.uint8) << 3)


def from_e2m1(codes: Tensor) -> Tensor:
    """uint8 codes 0..15 -> float32."""
    index = (codes & 7).float()
    v = torch.where(index < 4, index * 0.5, torch.where(index < 6, index - 2, index * 2 - 8))
    return torch.where(codes > 7, -v, v)


def to_float8(x: Tensor, element: str) -> Tensor:
    """float32 -> float8, half to even, saturating; NaN stays NaN."""
    limit = ELEMENTS[element][1]
    return x.clamp(-limit, limit).to(FLOAT8[element])


def fma_round(q: Tensor, s: Tensor, z: Tensor, dtype: torch.dtype) -> Tensor:
    """q * s + z with one rounding, q small integers in float32.

    bf16 or f16 s, z: rounded once to `dtype`. float32 s, z: fused multiply-add in float32, then rounded to `dtype`.
    The sum is taken to odd (Boldo & Melquiond, "Emulation of FMA and correctly rounded sums", 2008), so that the rounding
    that follows cannot fall on a false midpoint: plain arithmetic fails when q * s is a midpoint and 0 < |z| < 2^-22 s.
    """
    if dtype == torch.float32 and s.dtype != torch.float32:
        return q * s.float() + z.float()  # the product is exact: 4 + 11 bits
    # rounding to odd needs two bits more than the rounding that follows, so a float32 result is summed in float64 too
    wide = torch.float64 if torch.float32 in (s.dtype, dtype) else torch.float32
    product, addend = q.to(wide) * s.to(wide), z.to(wide)  # exact: 4 + 24 bits in float64, 4 + 11 in float32
    total = _sum_to_odd(product, addend)
    return (total.float() if wide == torch.float64 else total).to(dtype)


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c of float32 tensors, rounded once to float32."""
    return _sum_to_odd(a.double() * b.double(), c.double()).float()  # 24 + 24 bits are exact in float64


def _sum_to_odd(a: Tensor, b: Tensor) -> Tensor:
    """a + b rounded to odd: exact sums as they are, others to the neighbour whose last bit is 1."""
    total = a + b
    shadow = total - a
    error = (a - (total - shadow)) + (b - shadow)  # Knuth's TwoSum: total + error == a + b
    integer = torch.int64 if total.dtype == torch.float64 else torch.int32
    even = (total.view(integer) & 1) == 0
    away = torch.where(error > 0, torch.inf, -torch.inf).to(total.dtype)
    return torch.where(even & (error != 0) & error.isfinite(), torch.nextafter(total, away), total)
