"""float8 with float32 scales: one per row, per tensor, or per block of rows x cols.

    s = absmax / max, in x's dtype, then float32;  q = sat(x / s), a true float32 division;  value = q * s

With one scale for a whole row the codes are the operand and the scale multiplies the accumulator, so nothing is rounded
twice. A block's scale cannot wait that long: a kernel for blocks sums each block's products by themselves, multiplies
by both scales and adds (`ops/gemm/reference.py` has the order); where only one side has blocks, its operand is the
decoded value, rounded once. Blocks of 1 x 128 for activations and 128 x 128 for weights are DeepSeek-V3's and
torchao's; the last block of rows may be short.

"-pow2" rounds a scale up to a power of two, s = 2^ceil(log2(absmax / max)), in float32: dividing is then exact. It is
torchao's round_scales_to_power_of_2, which rounds max / absmax down and multiplies by it, and DeepSeek's UE8M0 scales.

low and high bound the absmax, as torchao's hp_value_lb and hp_value_ub do; values beyond high saturate. A block of
zeros stores scale 0 and zero codes; torchao divides 0 by 0 there and stores NaN. Source: torchao 0.18
`_choose_scale_float8`, `_quantize_affine_float8`.
"""

import re
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .base import Encoded, Scales
from .elements import ELEMENTS, from_float8, rounding_limit, to_float8
from .fixed import OneScale, constants, fixed_name
from .scales import absmax, divide

_NAME = re.compile(
    r"fp8(?:-(e5m2))?-(?:(row|tensor)|([1-9]\d*)x([1-9]\d*))(-pow2)?(-native)?(-wide)?(?::lb([^:]+))?(?::ub([^:]+))?",
)


@dataclass(frozen=True)
class Float8(OneScale):
    """float8 e4m3 or e5m2; scale (R, 1), (1, 1) or (ceil(R / rows), K / cols), float32.

    native: divide as x's device does (see scales.py). rows, cols: of a block. low, high: bounds of the absmax. fixed:
        (scale,), a constant instead of one made from x; per tensor only. wide: x is taken as float32, for a float16 x
        whose scales leave its range. pow2: scales are powers of two.
    """

    element: str = "e4m3"
    per: str = "row"  # | "tensor" | "block"
    native: bool = False
    rows: int = 1
    cols: int = 0
    low: float | None = None
    high: float | None = None
    wide: bool = False
    pow2: bool = False
    row_floor = 0.0  # under a row's absmax
    bits = 8

    @classmethod
    def parse(cls, name: str) -> "Float8 | None":
        """The format called `name`; None when it is no float8 format's name."""
        if (match := _NAME.fullmatch(name)) is None:
            return None
        element, per, rows, cols, pow2, native, wide, *bounds = match.groups()
        try:
            low, high = (None if b is None else float(b) for b in bounds)
        except ValueError:
            return None
        sizes = int(rows or 1), int(cols or 0)
        return cls(element or "e4m3", per or "block", bool(native), *sizes, low, high, bool(wide), bool(pow2))

    @property
    def name(self) -> str:
        element = "" if self.element == "e4m3" else f"-{self.element}"
        per = f"{self.rows}x{self.cols}" if self.per == "block" else self.per
        bounds = "".join(f":{n}{b!r}" for n, b in (("lb", self.low), ("ub", self.high)) if b is not None)
        options = f"{'-pow2' if self.pow2 else ''}{'-native' if self.native else ''}{'-wide' if self.wide else ''}"
        return f"fp8{element}-{per}{options}{bounds}{fixed_name(self.fixed)}"

    @property
    def widened(self) -> "Float8 | None":
        return replace(self, wide=True) if type(self) is Float8 and not self.fixed else None

    @property
    def narrow_of_float32(self) -> bool:
        return self.wide

    @property
    def narrow(self) -> "Float8":
        return replace(self, wide=False) if self.wide else self

    @property
    def sums_blocks(self) -> bool:
        return self.per == "block"

    @property
    def family(self) -> str:
        if self.per == "tensor":
            return "fp8 per tensor"
        return "fp8 in blocks of 128" if self.block == 128 and self.rows in (1, 128) else self.name

    @property
    def standard(self) -> str:
        return "fp8" if self.element == "e4m3" else ""

    @property
    def block(self) -> int | None:
        return self.cols if self.per == "block" else None

    @property
    def tile_rows(self) -> int:
        return self.rows

    @property
    def square(self) -> bool:
        return self.per == "tensor" or (self.per == "block" and self.rows == self.cols)

    @property
    def widest(self) -> str:
        return self.per

    def measure(self, x_RK: Tensor) -> Scales:
        if self.fixed:
            return Scales(*constants(self.fixed, x_RK.device))
        amax = self._absmax(self._blocks(x_RK.float() if self.wide else x_RK))
        amax = amax.float() if self.pow2 else amax
        scale = divide(amax, ELEMENTS[self.element].largest, native=self.native).float()
        return Scales(power_of_two_above(scale) if self.pow2 else scale)

    def quantize(self, x_RK: Tensor, s: Scales) -> Encoded:
        x_RGB, scale = self._blocks(x_RK), s.scale
        assert scale is not None
        s_RG1 = self.spread(scale, x_RK.shape[0]).unsqueeze(-1)
        codes = to_float8(x_RGB.float() / torch.where(s_RG1 == 0, 1.0, s_RG1), self.element)
        codes.view(torch.uint8).mul_(s_RG1 != 0)
        return Encoded(codes.flatten(1), scale, None, None, x_RK.shape[1])

    def operand(self, e: Encoded, dtype: torch.dtype) -> Tensor:
        if self.per != "block":
            return from_float8(e.codes, dtype)
        s_RG1 = self.spread(e.scales, e.codes.shape[0]).unsqueeze(-1)
        return self._blocks(from_float8(e.codes, torch.float32)).mul_(s_RG1).flatten(1).to(dtype)

    def alpha(self, e: Encoded) -> Tensor | None:
        return None if self.per == "block" else e.scale

    def saturated(self, x_RK: Tensor, e: Encoded) -> Tensor:
        s_RG1 = self.spread(e.scales, x_RK.shape[0]).unsqueeze(-1)
        return (self._blocks(x_RK).float().abs() > s_RG1 * rounding_limit(self.element)).flatten(1)

    def floored(self, e: Encoded) -> Tensor:
        return e.scales < torch.finfo(torch.float32).smallest_normal

    def _absmax(self, x_RGB: Tensor) -> Tensor:
        """Scale-shaped, in x's dtype, within the bounds."""
        amax = self._tiles(absmax(x_RGB.reshape(1, 1, -1) if self.per == "tensor" else x_RGB))
        return amax if self.low is None and self.high is None else amax.clamp(min=self.low, max=self.high)


def power_of_two_above(scale: Tensor) -> Tensor:
    """Round positive float32 scales up to powers of two, at least 2^-126; 0, Inf and NaN stay."""
    up = (scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000
    return torch.where(scale.isnan(), scale, up.view(torch.float32))
