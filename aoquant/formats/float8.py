"""float8 with one float32 scale per row or per tensor.

    s = absmax / max, in x's dtype, then float32;  q = sat(x / s), a true float32 division;  value = q * s

The codes are the operand and the scale multiplies the accumulator, so nothing is rounded twice. A block of zeros stores scale 0
and zero codes; torchao divides 0 by 0 there and stores NaN. Source: torchao 0.18 `_choose_scale_float8`, `_quantize_affine_float8`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .base import Encoded, Format, Scales
from .elements import ELEMENTS, to_float8
from .scales import absmax, check_fixed, constants, divide, fixed_name


@dataclass(frozen=True)
class Float8(Format):
    """float8 e4m3 or e5m2, scale (R, 1) or (1, 1) float32. native: divide as x's device does (see scales.py).

    fixed: (scale,), a constant instead of one made from x; per tensor only.
    """

    element: str = "e4m3"
    per: str = "row"  # | "tensor"
    native: bool = False
    fixed: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        element = "" if self.element == "e4m3" else f"-{self.element}"
        return f"fp8{element}-{self.per}{'-native' if self.native else ''}{fixed_name(self.fixed)}"

    @property
    def bits(self) -> int:
        return 8

    @property
    def per_tensor(self) -> bool:
        return self.per == "tensor" and not self.fixed

    def fix(self, *numbers: float) -> Format:
        if not self.per_tensor:
            return super().fix(*numbers)
        return replace(self, fixed=check_fixed(self.name, numbers, 1))

    def measure(self, x_RK: Tensor) -> Scales:
        if self.fixed:
            return Scales(*constants(self.fixed, x_RK.device))
        grouped = x_RK if self.per == "row" else x_RK.reshape(1, -1)
        return Scales(divide(absmax(grouped).unsqueeze(-1), ELEMENTS[self.element][1], native=self.native).float())

    def quantize(self, x_RK: Tensor, s: Scales) -> Encoded:
        x_RK, scale = x_RK.contiguous(), s.scale  # and so are the codes
        assert scale is not None
        codes = to_float8(x_RK.float() / torch.where(scale == 0, 1.0, scale), self.element)
        return Encoded(torch.where(scale == 0, torch.zeros_like(codes), codes), scale, None, None, x_RK.shape[1])

    def operand(self, e: Encoded, dtype: torch.dtype) -> Tensor:
        return e.codes.to(dtype)

    def alpha(self, e: Encoded) -> Tensor | None:
        return e.scale

    def saturated(self, x_RK: Tensor, e: Encoded) -> Tensor:
        assert e.scale is not None
        # one code step above the largest: a value that rounding alone brings back is not clipped
        return x_RK.float().abs() > e.scale * (ELEMENTS[self.element][1] * (1 + 2.0 ** -ELEMENTS[self.element][2]))

    def floored(self, e: Encoded) -> Tensor:
        assert e.scale is not None
        return e.scale < torch.finfo(torch.float32).smallest_normal
