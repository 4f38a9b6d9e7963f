"""NVFP4 with searched block scales: of thirteen e4m3 scales around a block's usual one, the one whose codes lose least.

    t = absmax / 1536;  b = e4m3 byte of clamp(amax_b / 6 / t, 2^-6, 448);  candidates: b, then b - 4 .. b + 8 in order, within 2^-6 .. 448
    y = x (1 / t);  code = e2m1(x ((1 / t) / s));  error = sum of (code s - y)^2 in float32, k = 0..15 in order;  keep the smallest, strict <

1536 = 6 * 256 and not 6 * 448, as in four-over-six: the block that holds the tensor's absmax may then be given a larger scale too, one
under which its absmax becomes 4. Codes, scales and decoding are NVFP4's, so every NVFP4 kernel runs what this makes; only encoding costs
more, which is why it is for weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import layout
from .base import Encoded, Format, Scales
from .blockscaled import E4M3_FLOOR, NVFP4, PTS_FLOOR
from .elements import E2M1_MAX, ELEMENTS, FLOAT8, from_e2m1, to_e2m1
from .fixed import check_fixed
from .scales import absmax, divide

DOWN, UP = 4, 8
LOWEST, HIGHEST = 0x08, 0x7E  # e4m3 bytes of 2^-6 and 448
TOP = 1536.0


@dataclass(frozen=True)
class NVFP4Search(NVFP4):
    """NVFP4 whose block scales are searched; outer scale "dynamic" (absmax / 1536), "static" (`pts`) or "none"."""

    @property
    def name(self) -> str:
        # spelt out: torch 2.11's compiler cannot follow super().name
        names = {"dynamic": "nvfp4-search", "none": "nvfp4-search-none", "static": f"nvfp4-search-static:{self.pts!r}"}
        return names[self.outer]

    def fix(self, *numbers: float) -> Format:
        if not self.per_tensor:
            return super().fix(*numbers)
        return replace(self, outer="static", pts=check_fixed(self.name, numbers, 1)[0])

    def measure(self, x_RK: Tensor) -> Scales:
        if self.outer != "dynamic":
            return super().measure(x_RK)
        return Scales(outer=divide(absmax(x_RK.reshape(1, -1)).float(), TOP).clamp(min=PTS_FLOOR).unsqueeze(-1))

    def quantize(self, x_RK: Tensor, s: Scales) -> Encoded:
        x_RGB = self._blocks(x_RK).float()
        amax = absmax(x_RGB)
        ratio = divide(torch.where(amax.isinf(), torch.nan, amax), E2M1_MAX)
        inverse = x_RGB.new_ones(1, 1) if s.outer is None else 1.0 / s.outer
        ratio = ratio if s.outer is None else ratio / s.outer
        usual = ratio.clamp(E4M3_FLOOR, ELEMENTS["e4m3"][1]).to(FLOAT8["e4m3"]).view(torch.uint8)
        y_RGB = x_RGB * inverse.unsqueeze(-1)
        best, codes, least = usual, *_coded(x_RGB, y_RGB, usual, inverse)
        for offset in range(-DOWN, UP + 1):
            byte = (usual.short() + offset).clamp(LOWEST, HIGHEST).to(torch.uint8)
            candidate, error = _coded(x_RGB, y_RGB, byte, inverse)
            better = error < least
            best, least = torch.where(better, byte, best), torch.where(better, error, least)
            codes = torch.where(better.unsqueeze(-1), candidate, codes)
        return Encoded(layout.pack(codes.flatten(1), 4), best.view(FLOAT8["e4m3"]), None, s.outer, x_RK.shape[1])


def _coded(x_RGB: Tensor, y_RGB: Tensor, byte_RG: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (R, G, 16) under the scales of these bytes, and their summed squared errors (R, G) in units of the outer scale."""
    scale = byte_RG.view(FLOAT8["e4m3"]).float()
    codes = to_e2m1(x_RGB * (inverse / scale).unsqueeze(-1))
    lost = (from_e2m1(codes) * scale.unsqueeze(-1) - y_RGB).square()
    total = lost[..., 0]
    for k in range(1, lost.shape[-1]):
        total = total + lost[..., k]
    return codes, total
