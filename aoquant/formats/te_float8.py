"""float8 as TransformerEngine computes it: x is multiplied by MAX / amax, and what is stored is the reciprocal of that
factor.

    factor = MAX / amax          one IEEE float32 division, MAX = 448 (e4m3) or 57344 (e5m2)
    q = saturate(x * factor)     rounded once to the element
    scale = 1 / factor           stored;  value = q * scale

`Float8` divides x by amax / MAX instead, which gives other codes and other scales. An amax of 0, Inf or NaN has the
factor 1, and a factor that overflows becomes the largest float32. Blocks of 1 x 128 (activations, gradients) and of 128
x 128 (weights) round their factor down to a power of two, 2^floor(log2(MAX / amax)), so that the stored scale is exact;
"-f32" keeps it as it is.

TransformerEngine saturates Inf to MAX. Here Inf becomes NaN (e4m3 has no other way to show it): an overflow in a
gradient has to reach the loss scaler. Every finite value has TransformerEngine's bytes. Source:
NVIDIA/TransformerEngine `Float8Quantizer`, `Float8BlockQuantizer`.
"""

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Encoded, Scales
from .elements import ELEMENTS, to_float8
from .fixed import constants, fixed_name
from .float8 import Float8
from .scales import solved

_NAME = re.compile(r"te-fp8(?:-(e5m2))?-(?:tensor|(1|128)x128(-f32)?)")
_FLT_MAX = torch.finfo(torch.float32).max
_EXPONENT = 0x7F800000  # of a float32


@dataclass(frozen=True)
class TEFloat8(Float8):
    """TransformerEngine's float8 e4m3 or e5m2; scale (1, 1), or (ceil(R / rows), K / 128), float32.

    pow2: whether the factor of a block is rounded down to a power of two.
    """

    per: str = "tensor"  # | "block"
    pow2: bool = True

    @classmethod
    def parse(cls, name: str) -> "TEFloat8 | None":
        """The format called `name`; None when it is no name of this class."""
        if (match := _NAME.fullmatch(name)) is None:
            return None
        element, rows, float32 = match.groups()
        if rows is None:
            return cls(element or "e4m3")
        return cls(element or "e4m3", "block", rows=int(rows), cols=128, pow2=float32 is None)

    @property
    def name(self) -> str:
        element = "" if self.element == "e4m3" else f"-{self.element}"
        if self.per == "tensor":
            return f"te-fp8{element}-tensor{fixed_name(self.fixed)}"
        return f"te-fp8{element}-{self.rows}x{self.cols}{'' if self.pow2 else '-f32'}"

    def measure(self, x_RK: Tensor) -> Scales:
        """The factors: (1, 1) or one for each block; a constant one is what delayed scaling leaves."""
        if self.fixed:
            return Scales(constants(self.fixed, x_RK.device)[0])
        return Scales(self.factor(self._absmax(self._blocks(x_RK)).float()))

    def factor(self, amax: Tensor) -> Tensor:
        """The float32 factor of x, from float32 absolute maxima."""
        factor = (torch.full_like(amax, ELEMENTS[self.element].largest) / amax).clamp(max=_FLT_MAX)
        if self.per == "block" and self.pow2:
            factor = (factor.view(torch.int32) & _EXPONENT).view(torch.float32)
        return torch.where((amax == 0) | ~amax.isfinite(), 1.0, factor)

    def held(self, e: Encoded) -> Scales:
        return Scales(solved(torch.reciprocal, e.scales.reciprocal(), e.scales))

    def quantize(self, x_RK: Tensor, s: Scales) -> Encoded:
        x_RGB, factor = self._blocks(x_RK).float(), s.scale
        assert factor is not None
        y_RGB = x_RGB * self.spread(factor, x_RK.shape[0]).unsqueeze(-1)
        codes = to_float8(torch.where(x_RGB.isinf(), torch.nan, y_RGB), self.element)
        return Encoded(codes.flatten(1), factor.reciprocal(), None, None, x_RK.shape[1])
