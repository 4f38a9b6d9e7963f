"""Block-scaled formats: MX (blocks of 32, power-of-two scales) and NVFP4 (blocks of 16, e4m3 scales, an outer scale).

e2m1 x e8m0, e2m1 x e4m3 and e4m3 x e8m0 products have at most 6 significant bits, so an operand decoded WITHOUT the
outer scale is exact in bf16, and a bf16 GEMM with float32 accumulation sums exactly the products that an FP4 tensor
core sums. The outer scale multiplies the accumulator. With it folded into the operand only 13 % of the values are
exact.

An outer scale of the whole tensor ties the rows of a batch together: a row's codes then depend on its neighbours'
largest value. "nvfp4-row" gives each row an outer scale of its own, made by the same rule, and is what activations of
aoquant's own layers have by default. Since the outer scale waits for the accumulator, it costs the GEMM nothing: alpha
is (R, 1) in place of (1, 1).

Dialect "ao": torchao 0.18 `to_mx` and `nvfp4_quantize`. NVFP4 there:

    pts = absmax / 2688 (2688 = 448 * 6);  sf = e4m3(clamp(amax_b / 6 / pts, 2^-6, 448))
    code = e2m1(y * ((1 / pts) / sf));  value = code * (pts * sf), in this order

torchao turns an all-zero tensor (pts = 0) and an absmax below 7.9e-36 (1 / pts overflows) into NaN. Here pts is at
least 2^-121, so that (1 / pts) / sf is finite for every sf: the first becomes zeros, the second is coded like any other
tensor, in steps of 2^-128. Bytes therefore differ from torchao's below an absmax of 1.01e-33. Inf becomes NaN; torchao
clips it unless pts is dynamic.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import layout
from .base import Encoded, Format, Scales
from .elements import E2M1_MAX, ELEMENTS, FLOAT8, from_e2m1, from_float8, rounding_limit, to_e2m1, to_float8
from .fixed import check_fixed
from .scales import absmax, divide, e8m0_bytes, e8m0_values, visible_e4m3, visible_e8m0

E4M3_FLOOR = 2.0**-6  # smallest normal: torchao never stores a smaller block scale
PTS_FLOOR = 2.0**-121
NVFP4_TOP = E2M1_MAX * ELEMENTS["e4m3"].largest  # 2688
_NAMES = {"dynamic": "nvfp4", "row": "nvfp4-row", "none": "nvfp4-none"}


@dataclass(frozen=True)
class MX(Format):
    """OCP MX: e2m1, e4m3 or e5m2 codes, one e8m0 scale per 32 values; rule "rceil", "floor", "ceil" or "even"."""

    element: str = "e2m1"
    rule: str = "rceil"

    @property
    def name(self) -> str:
        base = {"e2m1": "mxfp4", "e4m3": "mxfp8", "e5m2": "mxfp8-e5m2"}[self.element]
        return base if self.rule == "rceil" else f"{base}-{self.rule}"

    @property
    def bits(self) -> int:
        return 4 if self.element == "e2m1" else 8

    block = 32  # no property: every pass over blocks asks
    block_scale = torch.float8_e8m0fnu
    outer = ""  # nothing above the blocks

    @property
    def family(self) -> str:
        return "mxfp4" if self.element == "e2m1" else "mxfp8"

    @property
    def standard(self) -> str:
        return {"e2m1": "mxfp4", "e4m3": "mxfp8"}.get(self.element, "") if self.tile_rows == 1 else ""

    def measure(self, x_RK: Tensor) -> Scales:
        amax = self._tiles(absmax(self._blocks(x_RK)).float())
        byte = e8m0_bytes(amax, self.rule, ELEMENTS[self.element])
        return Scales(byte.view(torch.float8_e8m0fnu))

    def hold(self, x_RK: Tensor, s: Scales) -> Encoded:
        return self.quantize(x_RK, Scales(visible_e8m0(self._blocks(x_RK), s.scales)))

    def quantize(self, x_RK: Tensor, s: Scales) -> Encoded:
        x_RGB, byte = self._blocks(x_RK).float(), s.scales.view(torch.uint8)
        y = (x_RGB * self._inverse(byte).unsqueeze(-1)).flatten(1)
        codes = layout.pack(to_e2m1(y), 4) if self.element == "e2m1" else to_float8(y, self.element)
        return Encoded(codes, s.scales, None, None, x_RK.shape[1])

    def operand(self, e: Encoded, dtype: torch.dtype) -> Tensor:
        return self._blocks(self._values(e)).mul_(self._scale(e).unsqueeze(-1)).flatten(1).to(dtype)

    def saturated(self, x_RK: Tensor, e: Encoded) -> Tensor:
        limit = self._scale(e) * rounding_limit(self.element)
        return (self._blocks(x_RK).abs() > limit.unsqueeze(-1)).flatten(1)

    def floored(self, e: Encoded) -> Tensor:
        holds_data = (self._blocks(self._values(e)) != 0).any(-1)
        return (e.scales.view(torch.uint8) == 0) & self._tiles(holds_data)

    def inside(self, e: Encoded) -> Tensor:
        """A block whose largest value was rounded down to one that asks for a smaller scale is moved up, within its
        codes.
        """
        v_RK = super().inside(e)
        anew, stored = self.measure(v_RK).scale, e.scale
        assert anew is not None and stored is not None
        smaller = self.spread(anew.view(torch.uint8) != stored.view(torch.uint8), len(v_RK))
        return self._blocks(v_RK).mul(torch.where(smaller, 1 + 2.0**-6, 1.0).unsqueeze(-1)).flatten(1)

    def _inverse(self, byte: Tensor) -> Tensor:
        """The factor of x: exact powers of two, NaN for byte 255. torchao's two rules differ at byte 0 alone."""
        if self.rule == "rceil":
            inverse = e8m0_values((254 - byte.int()).clamp(min=0).to(torch.uint8))
            return torch.where(byte == 255, float("nan"), torch.where(byte == 0, 1.0, inverse))
        return 1.0 / e8m0_values(byte).clamp(min=2.0**-126)

    def _values(self, e: Encoded) -> Tensor:
        return e2m1_values(e) if self.element == "e2m1" else from_float8(e.codes, torch.float32)

    def _scale(self, e: Encoded) -> Tensor:
        return e8m0_values(e.scales.view(torch.uint8))


@dataclass(frozen=True)
class NVFP4(Format):
    """NVFP4: e2m1 codes, one e4m3 scale per 16 values.

    outer: the scale above the blocks: "row" (of each row, its absmax / 2688), "dynamic" (of the tensor), "static"
        (`pts`) or "none".
    """

    outer: str = "dynamic"
    pts: float | None = None
    bits = 4

    def __post_init__(self) -> None:
        if (self.outer == "static") != (self.pts is not None) or (
            self.pts is not None and not PTS_FLOOR <= self.pts < float("inf")
        ):
            raise ValueError(
                "NVFP4: a static outer scale, and only that, needs a finite pts of at least 2^-121 (absmax / 2688); "
                f"got outer={self.outer!r}, pts={self.pts}"
            )

    @property
    def name(self) -> str:
        return _NAMES[self.outer] if self.pts is None else f"nvfp4-static:{self.pts!r}"

    element = "e2m1"
    block = 16  # no property: every pass over blocks asks
    block_scale = torch.float8_e4m3fn
    family = standard = "nvfp4"
    rule = ""  # a block's scale is no power of two

    @property
    def fixed(self) -> tuple[float, ...]:
        return () if self.pts is None else (self.pts,)

    @property
    def beside(self) -> Format:
        return NVFP4("row") if type(self) is NVFP4 and self.outer == "dynamic" else self

    @property
    def per_tensor(self) -> bool:
        return self.outer == "dynamic"

    @property
    def reach(self) -> str:
        return {"dynamic": "tensor", "row": "row"}.get(self.outer, "block")

    top = NVFP4_TOP  # absmax / outer scale: the largest code times the scale of the block that holds the absmax

    def fix(self, *numbers: float) -> Format:
        if not self.per_tensor:
            return super().fix(*numbers)
        return replace(self, outer="static", pts=check_fixed(self.name, numbers, 1)[0])

    def measure(self, x_RK: Tensor) -> Scales:
        if self.outer == "none":
            return Scales()
        if self.outer == "static":
            return Scales(outer=torch.full((1, 1), self.pts, dtype=torch.float32, device=x_RK.device))  # type: ignore[arg-type]
        together = x_RK.unsqueeze(1) if self.outer == "row" else x_RK.reshape(1, 1, -1)
        return Scales(outer=divide(absmax(together).float(), self.top).clamp(min=PTS_FLOOR))

    def quantize(self, x_RK: Tensor, s: Scales) -> Encoded:
        x_RGB = self._blocks(x_RK).float()
        scale = block_scales(x_RGB, s.outer) if s.scale is None else visible_e4m3(x_RGB, s.scale)
        inverse = (1.0 if s.outer is None else 1.0 / s.outer) / scale.float()
        codes = to_e2m1((x_RGB * inverse.unsqueeze(-1)).flatten(1))
        return Encoded(layout.pack(codes, 4), scale, None, s.outer, x_RK.shape[1])

    def operand(self, e: Encoded, dtype: torch.dtype) -> Tensor:
        return e2m1_times(self, e, e.scales.float()).to(dtype)

    def decode(self, e: Encoded, dtype: torch.dtype) -> Tensor:
        scale = e.scales.float() if e.outer is None else e.outer * e.scales.float()
        return e2m1_times(self, e, scale).to(dtype)

    def saturated(self, x_RK: Tensor, e: Encoded) -> Tensor:
        limit = e.scales.float() * (e.outer if e.outer is not None else 1.0) * rounding_limit("e2m1")
        return (self._blocks(x_RK).abs() > limit.unsqueeze(-1)).flatten(1)

    def floored(self, e: Encoded) -> Tensor:
        return (e.scales.float() == E4M3_FLOOR) & (self._blocks(layout.unpack(e.codes, 4, e.k) & 7) < 6).all(-1)


def block_scales(x_RGB: Tensor, outer: Tensor | None, largest: float = E2M1_MAX, least: float = E4M3_FLOOR) -> Tensor:
    """(R, G) e4m3: amax_b / largest / outer, within `least` .. 448; NaN for blocks that hold NaN or Inf.

    x_RGB: float32. outer: (1, 1) or (R, 1) float32, or None for 1. largest: a block's amax divided by
        its scale.
    """
    amax = absmax(x_RGB)
    ratio = divide(torch.where(amax.isinf(), torch.nan, amax), largest)  # the clamp would hide Inf
    if outer is not None:
        ratio = ratio / outer
    return ratio.clamp(least, ELEMENTS["e4m3"].largest).to(FLOAT8["e4m3"])


def e2m1_values(e: Encoded) -> Tensor:
    """(R, K) float32 values of packed e2m1 codes."""
    return layout.lookup(e.codes, from_e2m1(torch.arange(16, dtype=torch.uint8, device=e.codes.device)), e.k)


def e2m1_times(format: Format, e: Encoded, scale_RG: Tensor) -> Tensor:
    """(R, K) float32 values of packed e2m1 codes, times the scales of their blocks."""
    return format._blocks(e2m1_values(e)).mul_(scale_RG.unsqueeze(-1)).flatten(1)
