"""MXFP8 in tiles of 32 x 32: one e8m0 scale for a square, so that a transposed weight has the transposed codes and
scales.

A weight that forward and dgrad both read is then encoded once, and backward differentiates exactly what forward
computed. It loses a little: 1024 values share an exponent in place of 32. The largest |value| of a tile, the rule
"rceil", rounding and saturation are those of `MX`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Encoded, Scales
from .blockscaled import MX


@dataclass(frozen=True)
class MXSquare(MX):
    """e4m3 or e5m2 codes, scale (ceil(R / 32), K / 32) float8_e8m0fnu."""

    element: str = "e4m3"
    tile_rows = 32
    square = True

    def __post_init__(self) -> None:
        if self.element == "e2m1" or self.rule != "rceil":
            raise ValueError(f"tiles of 32 x 32 are MXFP8's, with scales rounded up, got {super().name}")

    @property
    def name(self) -> str:
        return f"{super().name}-32x32"

    def hold(self, x_RK: Tensor, s: Scales) -> Encoded:
        return self.quantize(x_RK, s)

    def quantize(self, x_RK: Tensor, s: Scales) -> Encoded:
        each_row = self.spread(s.scales.view(torch.uint8), x_RK.shape[0]).view(torch.float8_e8m0fnu)
        return super().quantize(x_RK, Scales(each_row))._replace(scale=s.scales)

    def _scale(self, e: Encoded) -> Tensor:
        return self.spread(super()._scale(e), e.codes.shape[0])
