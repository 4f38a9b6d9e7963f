"""float8 with one float32 scale per row or per tensor.

    s = absmax / max, in x's dtype, then float32;  q = sat(x / s), a true float32 division;  value = q * s

The codes are the operand and the scale multiplies the accumulator, so nothing is rounded twice. A block of zeros stores scale 0
and zero codes; torchao divides 0 by 0 there and stores NaN. Source: torchao 0.18 `_choose_scale_float8`, `_quantize_affine_float8`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Encoded, Format
from .elements import ELEMENTS, to_float8
from .scales import absmax, divide


@dataclass(frozen=True)
class Float8(Format):
    """float8 e4m3 or e5m2, scale (R, 1) or (1, 1) float32. native: divide as x's device does (see scales.py)."""

    element: str = "e4m3"
    per: str = "row"  # | "tensor"
    native: bool = False

    @property
    def name(self) -> str:
        element = "" if self.element == "e4m3" else f"-{self.element}"
        return f"fp8{element}-{self.per}{'-native' if self.native else ''}"

    @property
    def bits(self) -> int:
        return 8

    def encode(self, x_RK: Tensor) -> Encoded:
        x_RK = x_RK.contiguous()  # and so are the codes
        grouped = x_RK if self.per == "row" else x_RK.reshape(1, -1)
        scale = divide(absmax(grouped).unsqueeze(-1), ELEMENTS[self.element][1], native=self.native).float()
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
