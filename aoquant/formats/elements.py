"""Elements: rounding a scaled value to the nearest code, and codes back to values.

e2m1 has the magnitudes 0 .5 1 1.5 2 3 4 6; the code is sign * 8 + index. Rounding is half to even, overflow saturates,
and a negative zero keeps its sign. float8 casts in eager PyTorch before 2.12 do not saturate, so every cast clamps
first; NaN survives. `fma_round` and `fma` are for kernels that fuse a multiplication and an addition into one rounding,
which no PyTorch operation promises.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

E2M1_MAX = 6.0
FLOAT32_MAX = torch.finfo(torch.float32).max
FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


class Element(NamedTuple):
    """The constants of the e8m0 rules: the exponent of the largest power of two, the largest value, mantissa bits."""

    max_pow2: int
    largest: float
    mantissa: int


ELEMENTS = {"e2m1": Element(2, E2M1_MAX, 1), "e4m3": Element(8, 448.0, 3), "e5m2": Element(15, 57344.0, 2)}


def rounding_limit(element: str) -> float:
    """Half a step above the largest code: 7, 464, 61440. Values beyond it are clipped; nearer ones are only rounded."""
    of = ELEMENTS[element]
    return of.largest + 2.0 ** (of.max_pow2 - of.mantissa - 1)


def to_e2m1(x: Tensor) -> Tensor:
    """float32 -> uint8 codes 0..15, half to even, saturating. NaN has no code; the block's scale carries it."""
    steps, below, sign = e2m1_steps(x)
    return steps.round_().to(torch.int8).view(torch.uint8).add_(below).bitwise_or_(sign)


def e2m1_steps(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """float32 -> (|x| in steps of its octave, float32; the index of step 0 in that octave, uint8;
    sign bit, uint8).

    Codes step by p / 2 from p = 1, 2 and 4 on, below 1 too, and an even multiple is an even code: one rounding of the
    steps serves every octave. NaN counts as 0, since a NaN that arithmetic made is negative on x86 and positive on
    CUDA; larger values count as 6.
    """
    v = x.nan_to_num(0.0).clamp_(-E2M1_MAX, E2M1_MAX)
    sign = (v.view(torch.int32) >> 28).to(torch.uint8).bitwise_and_(8)
    v.abs_()
    p = v.clamp(min=1.0).view(torch.int32).bitwise_and_(0x7F800000)
    steps = v.div_(p.view(torch.float32)).mul_(2.0)
    return steps, p.sub_(127 << 23).bitwise_right_shift_(22).to(torch.uint8), sign  # 2 log2 p


def nearest_e2m1(x: Tensor) -> Tensor:
    """from_e2m1(to_e2m1(x)), without the codes; NaN stays NaN."""
    v = x.clamp(-E2M1_MAX, E2M1_MAX)
    step = v.abs().clamp_(min=1.0).view(torch.int32).bitwise_and_(0x7F800000).sub_(1 << 23).view(torch.float32)
    return v.div_(step).round_().mul_(step)


def from_e2m1(codes: Tensor) -> Tensor:
    """uint8 codes 0..15 -> float32."""
    index = (codes & 7).float()
    v = torch.where(index < 4, index * 0.5, torch.where(index < 6, index - 2, index * 2 - 8))
    return torch.where(codes > 7, -v, v)


def to_float8(x: Tensor, element: str) -> Tensor:
    """float32 -> float8, half to even, saturating; NaN stays NaN."""
    limit = ELEMENTS[element].largest
    return x.clamp(-limit, limit).to(FLOAT8[element])


def from_float8(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """float8 -> `dtype`: a cast. On a CPU PyTorch's takes 3 ns a value, a table of the 256 values a fifth of that."""
    if codes.device.type != "cpu":
        return codes.to(dtype)
    table = torch.arange(256, dtype=torch.uint8, device=codes.device).view(codes.dtype).to(dtype)
    return table.index_select(0, codes.view(torch.uint8).flatten().int()).view(codes.shape)


def fma_round(q: Tensor, s: Tensor, z: Tensor, dtype: torch.dtype) -> Tensor:
    """q * s + z with one rounding, q integers from -8 to 8 in float32; s and z of one dtype, broadcast over q.

    bf16 or f16 s, z: rounded once to `dtype`. float32 s, z: fused multiply-add in float32, then rounded to `dtype`.
    The sum is taken to odd (Boldo & Melquiond, "Emulation of FMA and correctly rounded sums", 2008), so that the
    rounding that follows cannot fall on a false midpoint: plain arithmetic fails when q * s is a midpoint and 0 < |z| <
    2^-22 s.
    """
    if dtype == torch.float32 and s.dtype != torch.float32:
        return q * s.float() + z.float()  # the product is exact: 4 + 11 bits
    # rounding to odd needs two bits more than the rounding that follows, so a float32 result is summed in float64 too
    wide = torch.float64 if torch.float32 in (s.dtype, dtype) else torch.float32
    a, b = s.to(wide), z.to(wide)
    product = q.to(wide) * a  # exact: 4 + 24 bits in float64, 4 + 11 in float32
    if q.device.type == "cpu":
        total = product.add_(b)
        rounded = ~_sums_are_exact(s, z, wide)
        rounded = rounded.squeeze(-1) if rounded.shape[-1] == 1 else rounded
        if rounded.any():  # a group in thousands, as a rule
            total[rounded] = _sum_to_odd(q[rounded].to(wide) * a[rounded], b[rounded])
    else:
        total = _sum_to_odd(product, b)
    return (total.float() if wide == torch.float64 else total).to(dtype)


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c of float32 tensors, rounded once to float32."""
    return _sum_to_odd(a.double() * b.double(), c.double()).float()  # 24 + 24 bits are exact in float64


def _sums_are_exact(s: Tensor, z: Tensor, wide: torch.dtype) -> Tensor:
    """Return where q * s + z fits into `wide` for any |q| <= 8: from the last bit of s and z to the sum's first."""
    bits = 1 - int(math.log2(torch.finfo(s.dtype).eps))
    (_, e_s), (_, e_z) = torch.frexp(s.float()), torch.frexp(z.float())  # |s| < 2^e_s, a multiple of 2^(e_s - bits)
    first, last = torch.maximum(e_s + 3, e_z) + 1, torch.minimum(e_s, e_z) - bits
    return (first - last <= 1 - int(math.log2(torch.finfo(wide).eps))) | (s == 0) | (z == 0)


def _sum_to_odd(a: Tensor, b: Tensor) -> Tensor:
    """a + b rounded to odd: exact sums as they are, others to the neighbour whose last bit is 1."""
    total = a + b
    shadow = total - a
    error = (a - (total - shadow)) + (b - shadow)  # Knuth's TwoSum: total + error == a + b
    integer = torch.int64 if total.dtype == torch.float64 else torch.int32
    even = (total.view(integer) & 1) == 0
    away = torch.where(error > 0, torch.inf, -torch.inf).to(total.dtype)
    return torch.where(even & (error != 0) & error.isfinite(), torch.nextafter(total, away), total)
