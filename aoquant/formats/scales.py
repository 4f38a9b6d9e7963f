"""Scales: how a block's absmax becomes the number that its codes are multiplied by.

One trap lives here. `tensor / python_number` is a division on the CPU but, in PyTorch's CUDA kernels, a multiplication
by the float32 reciprocal. In bfloat16 the two agree for every divisor used here (checked on all 32640 non-negative
values); in float32 they differ by an ulp for a fifth to three quarters of the inputs. Weights are converted on a GPU
and the bytes have to be the same everywhere, so `divide` multiplies by the reciprocal on every device. `native=True`
leaves the choice to the device: right only where the deployed layer divides at run time too, as torchao's dynamic
activation quantisers do.

The e8m0 rules are OCP MX v1.0's (floor) and the usual alternatives; the byte is the biased exponent, 255 means NaN.
"""

import struct
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from .elements import Element

_MANTISSA = 23  # float32
_LONG = 1 << 14  # values of a row, or of a tensor as one row, that are not copied to find the largest


def float32(c: float) -> float:
    """c rounded to float32."""
    return float(struct.unpack("f", struct.pack("f", c))[0])


@cache
def reciprocal(c: float) -> float:
    """1 / c rounded to float32."""
    return float32(1.0 / c)


def divide(x: Tensor, c: float, *, native: bool = False) -> Tensor:
    """x / c for a constant c, in x's dtype, as PyTorch's CUDA kernels compute it; `native`: as x's own device does."""
    if native:
        return x / c
    return (x.float() * reciprocal(c)).to(x.dtype)


def quotient(x: Tensor, c: float) -> Tensor:
    """x / c in float32, correctly rounded on every device: for formats that are defined by IEEE divisions."""
    return x / torch.full((), c, dtype=torch.float32, device=x.device)


def absmax(x_RGB: Tensor) -> Tensor:
    """(R, G, block) -> (R, G) in x's dtype; NaN if any value is NaN; 0 for an empty tensor."""
    if x_RGB.numel() == 0:
        return x_RGB.new_zeros(x_RGB.shape[:-1])
    length = x_RGB.shape[-1]
    if isinstance(length, int) and length >= _LONG:  # a compiler's symbol would become a guard on the number of tokens
        return torch.maximum(x_RGB.amax(-1), -x_RGB.amin(-1)).abs()  # two readings, and no copy
    # magnitudes are ordered as float32's bits are, NaN on top; PyTorch reduces short rows of integers far faster than
    # of floats
    return (x_RGB.float().view(torch.int32) & 0x7FFFFFFF).amax(-1).view(torch.float32).to(x_RGB.dtype)


def sum_by_pairs(x_RGB: Tensor) -> Tensor:
    """(R, G) sums of blocks of 2^n values, neighbours first, then neighbouring sums: the same additions on every
    device.
    """
    while x_RGB.shape[-1] > 1:
        x_RGB = x_RGB[..., 0::2] + x_RGB[..., 1::2]
    return x_RGB.squeeze(-1)


def solved(function: Callable[[Tensor], Tensor], guess: Tensor, wanted: Tensor) -> Tensor:
    """The numbers nearest to `guess` that `function` maps to `wanted`, of up to four steps away; `guess` where none is.

    Roundings cannot be undone by the inverse operation, but a number that was rounded to `wanted` is near its result.
    """
    found, known = guess, function(guess) == wanted
    up = down = guess
    for _ in range(4):
        up, down = (t.nextafter(torch.full_like(t, end)) for t, end in ((up, torch.inf), (down, -torch.inf)))
        for candidate in (up, down):
            hit = ~known & (function(candidate) == wanted)
            found, known = torch.where(hit, candidate, found), known | hit
    return found


def visible(x_RGB: Tensor, scale: Tensor) -> Tensor:
    """`scale` (R, G), NaN for the groups of x that hold a NaN: integer codes have none."""
    return torch.where(x_RGB.isnan().any(-1), torch.nan, scale)


def visible_e4m3(x_RGB: Tensor, scale: Tensor) -> Tensor:
    """e4m3 `scale` (R, G), NaN for the groups of x that hold a NaN: e2m1 codes have none."""
    return visible(x_RGB, scale.float()).to(scale.dtype)


def visible_e8m0(x_RGB: Tensor, scale: Tensor) -> Tensor:
    """e8m0 `scale` (R, G), NaN for the groups of x that hold a NaN: e2m1 codes have none."""
    return torch.where(x_RGB.isnan().any(-1), 255, scale.view(torch.uint8)).view(torch.float8_e8m0fnu)


def e8m0_bytes(amax: Tensor, rule: str, element: Element) -> Tensor:
    """uint8 biased exponents of power-of-two scales.

    amax: float32. rule: "floor", "ceil", "even" (exponent of amax, down, up or after rounding the mantissa to the
        element's) or "rceil" (smallest power of two >= amax / the element's largest value).
    """
    if rule == "rceil":
        # exact, as the hardware's cvt.rp.ue8m0: ceil(log2(x)) in float32 misses powers of two by a few ulps
        bits = divide(amax, element.largest).view(torch.int32)
        exponent, mantissa = (bits >> _MANTISSA) & 0xFF, bits & 0x7FFFFF
        up = torch.where(exponent == 0, mantissa > 1 << (_MANTISSA - 1), mantissa > 0)
        byte = (exponent + up.int()).clamp(max=254)  # Inf -> 254
    else:
        bits = amax.view(torch.int32)
        if rule == "even":
            bits = (bits + (1 << (_MANTISSA - element.mantissa - 1))) & (0x1FF << _MANTISSA)
        exponent = (bits >> _MANTISSA) & 0xFF
        if rule == "ceil":
            exponent = exponent + ((bits & 0x7FFFFF) > 0).int()
        byte = (exponent - element.max_pow2).clamp(0, 255)
    return torch.where(amax.isnan(), 255, byte).to(torch.uint8)


def e8m0_values(byte: Tensor) -> Tensor:
    """float32 value 2^(byte - 127) of each scale byte; NaN for 255."""
    # 2^-127 is a float32 subnormal, so shifting the byte into the exponent field alone would give 0 for byte 0
    bits = torch.where(byte == 0, 1 << (_MANTISSA - 1), byte.int() << _MANTISSA)
    return torch.where(byte == 255, float("nan"), bits.view(torch.float32))
