"""FP4 as other libraries compute it: the same elements and blocks as MX and NVFP4, other scales, other orders of
operations.

A prepared layer has to name the kernel that it will run on, and these are not interchangeable: "xx" is QuantLinear
(WUSH), "qutlass" the kernels of that name, "te" TransformerEngine. MX, blocks of 32, e8m0 scales, s = 2^floor(log2 v),
the exponent of v as it is:

    name           v                     code              value        from
    xx-mxfp4       absmax                e2m1(3 (y / s))   code s / 3   QuantLinear: e8m0(absmax / (4/3)); never clips
    qutlass-mxfp4  absmax + 1e-8         the same          the same     fusedQuantizeMx, method "abs_max"
    mxfp4-quest    sigma * k + 1e-8      e2m1(y / s)       code s       Quartet, and fusedQuantizeMx, method "quest"

sigma^2 = max(E[y^2] - E[y]^2, 0) over the block, k = 2.92247856 / 6 = .48708. E is summed in float32 by pairs of
neighbours, then by pairs of those sums and so on, so that every device gets the same bits. `saturated` is what QuEST's
trust mask leaves out: |y / s| >= 6.

NVFP4, blocks of 16 (te: or tiles of 16 x 16), e4m3 scales q, g = absmax of the tensor / 2688 unless it is given:

    xx-nvfp4       q = e4m3(absmax_b / (6 g));              code = e2m1(y / (q g));            value = code (q g)
    qutlass-nvfp4  q = e4m3(G (absmax_b r6)), G = 1 / g;    code = e2m1(y (1 / (q (1 / G))));  value = code (q g)
    te-nvfp4       q = e4m3(absmax_b (S r6)), S = 2688 / A; code = e2m1(y min(1 / (q (1 / S)), FLT_MAX))
                   value = code ((q A) r2688)

r6 and r2688 are float32 reciprocals, A the tensor's absmax, and A is what te stores. Casts saturate. A scale that
underflows to 0 decodes to zeros, in codes of +-6, which tell it from a block of zeros. qutlass itself uses the device's
approximate reciprocals: with the IEEE ones here three codes in ten thousand differ. Inf and NaN make their block's
scale NaN (with te and dynamic g: the tensor's).
Sources: github.com/IST-DASLab/WUSH, /qutlass (its float64 test references), /Quartet; NVIDIA/TransformerEngine
`NVFP4QuantizerRef`.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from . import layout
from .base import Encoded, Format, Scales
from .blockscaled import NVFP4_TOP, PTS_FLOOR, e2m1_times
from .elements import E2M1_MAX, FLOAT32_MAX, rounding_limit, to_e2m1, to_float8
from .fixed import OneScale, constants, fixed_name
from .scales import absmax, divide, e8m0_values, reciprocal, sum_by_pairs, visible_e8m0

QUEST = 2.92247856 / 6
_HUGE = 2.0**60  # a block above it is scaled down before its values are squared


class _E2M1(Format):
    """Base of the FP4 dialects: packed codes, and operands that are code times block scale, exact in bf16."""

    element = "e2m1"
    bits = 4

    def scales(self, e: Encoded) -> Tensor:
        """(R, G) float32: the stored block scale of every row."""
        raise NotImplementedError

    def operand(self, e: Encoded, dtype: torch.dtype) -> Tensor:
        return e2m1_times(self, e, self.scales(e)).to(dtype)

    def _any_code(self, e: Encoded) -> Tensor:
        """(R, G) bool: whether a block has a code other than zero."""
        return self._blocks(layout.unpack(e.codes, 4, e.k) & 7).amax(-1) != 0


class _Rule(NamedTuple):
    """How an MXFP4 dialect scales a block: see `MXFP4Dialect`."""

    statistic: str
    tiny: float
    gain: float


_MX = {
    "xx-mxfp4": _Rule("absmax", 0.0, 3.0),
    "qutlass-mxfp4": _Rule("absmax", 1e-8, 3.0),
    "mxfp4-quest": _Rule("quest", 1e-8, 1.0),
}


@dataclass(frozen=True)
class MXFP4Dialect(_E2M1):
    """e2m1 codes, one e8m0 scale per 32 values; dialect: one of the names above."""

    dialect: str = "mxfp4-quest"

    @property
    def name(self) -> str:
        return self.dialect

    block = 32  # no property: every pass over blocks asks
    block_scale = torch.float8_e8m0fnu
    family = "mxfp4"

    @property
    def statistic(self) -> str:
        """Return what a block's scale is made of: "absmax", or "quest", the standard deviation."""
        return _MX[self.dialect].statistic

    @property
    def tiny(self) -> float:
        """Return what is added to the statistic."""
        return _MX[self.dialect].tiny

    @property
    def gain(self) -> float:
        """Return the factor of y / s before it is rounded."""
        return _MX[self.dialect].gain

    @property
    def post(self) -> float:
        """Return the factor of a decoded block, after its scale."""
        return reciprocal(self.gain)

    def measure(self, x_RK: Tensor) -> Scales:
        x_RGB = self._blocks(x_RK).float()
        v = absmax(x_RGB)
        if self.statistic == "quest":
            v = deviation(x_RGB, v) * QUEST
        byte = ((v + self.tiny).view(torch.int32) >> 23).to(torch.uint8)  # 255 for Inf and NaN
        return Scales(byte.view(torch.float8_e8m0fnu))

    def hold(self, x_RK: Tensor, s: Scales) -> Encoded:
        return self.quantize(x_RK, Scales(visible_e8m0(self._blocks(x_RK), s.scales)))

    def quantize(self, x_RK: Tensor, s: Scales) -> Encoded:
        codes = to_e2m1(self._scaled(x_RK, s.scales).flatten(1))
        return Encoded(layout.pack(codes, 4), s.scales, None, None, x_RK.shape[1])

    def scales(self, e: Encoded) -> Tensor:
        return e8m0_values(e.scales.view(torch.uint8))

    def alpha(self, e: Encoded) -> Tensor | None:
        if self.gain == 1:
            return None
        return torch.full((1, 1), self.post, dtype=torch.float32, device=e.codes.device)

    def decode(self, e: Encoded, dtype: torch.dtype) -> Tensor:
        return e2m1_times(self, e, self.scales(e) * self.post).to(dtype)

    def saturated(self, x_RK: Tensor, e: Encoded) -> Tensor:
        return (self._scaled(x_RK, e.scales).abs() >= E2M1_MAX).flatten(1)

    def floored(self, e: Encoded) -> Tensor:
        least = 100 if self.tiny else 0  # 2^-27 is what 1e-8 alone gives
        return (e.scales.view(torch.uint8) <= least) & self._any_code(e)

    def _scaled(self, x_RK: Tensor, scale: Tensor) -> Tensor:
        """(R, G, 32) float32: gain * (x / s), rounded once."""
        byte = scale.view(torch.uint8)
        inverse = torch.where(byte == 255, torch.nan, e8m0_values((254 - byte.int()).clamp(min=0).to(torch.uint8)))
        return self._blocks(x_RK).float() * inverse.unsqueeze(-1) * self.gain


def deviation(x_RGB: Tensor, amax_RG: Tensor) -> Tensor:
    """(R, G) float32 standard deviations of blocks of 32, E[x^2] - E[x]^2 clamped at 0; NaN where a block holds NaN or
    Inf.
    """
    down = torch.ones_like(amax_RG).masked_fill(amax_RG > _HUGE, 2.0**-96)
    x_RGB, each = x_RGB * down.unsqueeze(-1), 1 / x_RGB.shape[-1]
    mean, square = sum_by_pairs(x_RGB) * each, sum_by_pairs(x_RGB * x_RGB) * each
    return (square - mean * mean).clamp(min=0).sqrt() / down


@dataclass(frozen=True)
class NVFP4Dialect(_E2M1, OneScale):
    """e2m1 codes, one e4m3 scale per 16 values or (te) per tile of 16 x 16, an outer float32 scale.

    dialect: "xx", "qutlass" or "te". fixed: (outer scale,), a constant instead of one made from x: g, or te's A. tile:
        1 or 16 rows.
    """

    dialect: str = "xx"
    tile: int = 1

    @property
    def name(self) -> str:
        return f"{self.dialect}-nvfp4{'' if self.tile == 1 else '-16x16'}{fixed_name(self.fixed)}"

    block = 16  # no property: every pass over blocks asks
    block_scale = torch.float8_e4m3fn
    family = "nvfp4"

    @property
    def beside(self) -> Format:
        return replace(self, tile=1)

    tiny, gain = 0.0, 1.0  # as of `MXFP4Dialect`

    @property
    def statistic(self) -> str:
        """Return by which library's arithmetic a block's scale is made."""
        return self.dialect

    @property
    def post(self) -> float:
        """Return the factor of a decoded block, after its scale and the outer scale."""
        return reciprocal(NVFP4_TOP) if self.dialect == "te" else 1.0

    @property
    def square(self) -> bool:
        return self.tile == self.block

    @property
    def tile_rows(self) -> int:
        return self.tile

    def measure(self, x_RK: Tensor) -> Scales:
        if self.fixed:
            return Scales(outer=constants(self.fixed, x_RK.device)[0])
        amax = absmax(x_RK.reshape(1, -1)).float().unsqueeze(-1)
        return Scales(outer=amax if self.dialect == "te" else divide(amax, NVFP4_TOP).clamp(min=PTS_FLOOR))

    def quantize(self, x_RK: Tensor, s: Scales) -> Encoded:
        y_RGB, scale = self.scaled(x_RK, s)
        return Encoded(layout.pack(to_e2m1(y_RGB.flatten(1)), 4), scale, None, s.outer, x_RK.shape[1])

    def scaled(self, x_RK: Tensor, s: Scales) -> tuple[Tensor, Tensor]:
        """Return (R, G, 16) float32 values in units of their scale, before they are rounded, and the e4m3 scales."""
        assert s.outer is not None
        x_RGB, rows = self._blocks(x_RK).float(), x_RK.shape[0]
        amax = self._tiles(absmax(x_RGB))
        amax = torch.where(amax.isinf(), torch.nan, amax)  # a saturating cast would hide Inf
        if self.dialect == "xx":
            scale = self._block_scales(amax / (s.outer * E2M1_MAX), s)
            y_RGB = x_RGB / self.spread(scale.float() * s.outer, rows).unsqueeze(-1)
        else:
            if self.dialect == "qutlass":
                encode = s.outer.reciprocal()
                scale = self._block_scales(encode * (amax * reciprocal(E2M1_MAX)), s)
                inverse = (scale.float() * encode.reciprocal()).reciprocal()
            else:
                encode = (torch.full_like(s.outer, NVFP4_TOP) / s.outer).clamp(max=FLOAT32_MAX)
                encode = torch.where(s.outer == 0, 1.0, encode)
                scale = self._block_scales(amax * (encode * reciprocal(E2M1_MAX)), s)
                inverse = (scale.float() * encode.reciprocal()).reciprocal().clamp(max=FLOAT32_MAX)
            y_RGB = x_RGB * self.spread(inverse, rows).unsqueeze(-1)
        return y_RGB, scale

    def scales(self, e: Encoded) -> Tensor:
        return self.spread(e.scales.float(), e.codes.shape[0])

    def alpha(self, e: Encoded) -> Tensor | None:
        assert e.outer is not None
        return e.outer if self.post == 1 else e.outer * self.post

    def decode(self, e: Encoded, dtype: torch.dtype) -> Tensor:
        return e2m1_times(self, e, self._steps(e)).to(dtype)

    def saturated(self, x_RK: Tensor, e: Encoded) -> Tensor:
        step = self._steps(e).unsqueeze(-1)
        return ((self._blocks(x_RK).float().abs() > step * rounding_limit("e2m1")) & (step != 0)).flatten(1)

    def floored(self, e: Encoded) -> Tensor:
        return (e.scales.float() == 0) & (self._tiles(self._any_code(e).float()) != 0)

    def _block_scales(self, asked: Tensor, s: Scales) -> Tensor:
        """(T, G) e4m3: what the tiles ask for, or the held scales; NaN for tiles that hold NaN or Inf."""
        if s.scale is None:
            return to_float8(asked, "e4m3")
        return torch.where(asked.isnan(), torch.nan, s.scale.float()).to(s.scale.dtype)

    def _steps(self, e: Encoded) -> Tensor:
        """(R, G) float32: the value of code 1."""
        assert e.outer is not None
        step = self.scales(e) * e.outer
        return step if self.post == 1 else step * self.post
