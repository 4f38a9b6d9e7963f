"""NVFP4 with searched block scales: of thirteen e4m3 scales around a block's usual one, the one whose codes lose least.

    t = absmax / 1536;  b = e4m3 byte of clamp(amax_b / 6 / t, 2^-6, 448)
    candidates: b, then b - 4 .. b + 8 in order, within 2^-6 .. 448
    y = x (1 / t);  code = e2m1(x ((1 / t) / s));  error = sum of (code s - y)^2 in float32, k = 0..15 in order
    keep the candidate of the smallest error; the earlier one wins a tie

1536 = 6 * 256 and not 6 * 448, as in four-over-six: the block that holds the tensor's absmax may then be given a larger
scale too, one under which its absmax becomes 4. Codes, scales and decoding are NVFP4's, so every NVFP4 kernel runs what
this makes; only encoding costs more, which is why it is for weights. "nvfp4-search-row" has an outer scale for each
row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from . import layout
from .base import Encoded, Scales
from .blockscaled import NVFP4, block_scales
from .contest import TOP
from .elements import FLOAT8, from_e2m1, to_e2m1
from .scales import visible_e4m3

DOWN, UP = 4, 8
LOWEST, HIGHEST = 0x08, 0x7E  # e4m3 bytes of 2^-6 and 448
_NAMES = {"dynamic": "nvfp4-search", "row": "nvfp4-search-row", "none": "nvfp4-search-none"}


@dataclass(frozen=True)
class NVFP4Search(NVFP4):
    """NVFP4 whose block scales are searched; outer scale "dynamic" or "row" (absmax / 1536), "static" (`pts`) or
    "none".
    """

    @property
    def name(self) -> str:
        # spelt out: torch 2.11's compiler cannot follow super().name
        return _NAMES[self.outer] if self.pts is None else f"nvfp4-search-static:{self.pts!r}"

    top = TOP

    @property
    def beside(self) -> NVFP4:
        return NVFP4("row")

    def held(self, e: Encoded) -> Scales:
        """With the scales of the blocks: another candidate may give the same values by other codes."""
        return super().held(e)._replace(scale=e.scale)

    def quantize(self, x_RK: Tensor, s: Scales) -> Encoded:
        x_RGB = self._blocks(x_RK).float()
        inverse = x_RGB.new_ones(1, 1) if s.outer is None else 1.0 / s.outer
        if s.scale is not None:
            scale = visible_e4m3(x_RGB, s.scale)
            codes, _ = _coded(x_RGB, x_RGB, scale.view(torch.uint8), inverse)
            return Encoded(layout.pack(codes.flatten(1), 4), scale, None, s.outer, x_RK.shape[1])
        usual = block_scales(x_RGB, s.outer).view(torch.uint8)
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
    """Codes (R, G, 16) under these scales, and their summed squared errors (R, G) in units of the outer scale."""
    scale = byte_RG.view(FLOAT8["e4m3"]).float()
    codes = to_e2m1(x_RGB * (inverse / scale).unsqueeze(-1))
    lost = (from_e2m1(codes) * scale.unsqueeze(-1) - y_RGB).square()
    total = lost[..., 0]
    for k in range(1, lost.shape[-1]):
        total = total + lost[..., k]
    return codes, total
