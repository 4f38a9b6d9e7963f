"""Stretched integers: a grid without zero, (q + 1/2) * s, that clips what lies beyond `width` mean magnitudes.

    s = max(min(width * mean|x|, absmax), eps) / (2^(width-1) - 1/2)
    q = rn(clamp(x, +-s * (2^(width-1) - 1/2)) / s - 1/2);  value = (q + 1/2) * s

Each step is rounded to x's dtype.

For 1 to 4 bits a zero code wastes half a level; here the codes are symmetric about zero. ParetoQ trains it, and PARQ
exports it as torchao's StretchedIntxWeightConfig. Source: torchao 0.18 `choose_qparams_stretched_affine`,
`quantize_stretched_affine`. eps is the dtype's epsilon, so a group of zeros decodes to half of eps / (2^(width-1) -
1/2): the grid has no zero.
"""

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from . import layout
from .base import Encoded, Format, Scales
from .scales import absmax, divide, visible

_NAME = re.compile(r"stretched([1-7])-(?:row|g([1-9]\d*))")


@dataclass(frozen=True)
class Stretched(Format):
    """Integers of 1 to 7 bits around half steps, a scale (R, G) in x's dtype per group, or per row when group is 0."""

    width: int = 2
    group: int = 0
    from_extremes = False  # a mean is in them

    @classmethod
    def parse(cls, name: str) -> "Stretched | None":
        """The format called `name`; None when it is no stretched format's name."""
        match = _NAME.fullmatch(name)
        return None if match is None else cls(int(match[1]), int(match[2] or 0))

    @property
    def name(self) -> str:
        return f"stretched{self.width}-{f'g{self.group}' if self.group else 'row'}"

    @property
    def bits(self) -> int:
        return self.width

    @property
    def block(self) -> int | None:
        return self.group or None

    @property
    def limit(self) -> float:
        """The largest |value| / scale."""
        return 2.0 ** (self.width - 1) - 0.5

    def measure(self, x_RK: Tensor) -> Scales:
        x_RGB = self._blocks(x_RK)
        top = torch.minimum(self.width * x_RGB.abs().mean(-1), absmax(x_RGB))
        return Scales(divide(top.clamp(min=torch.finfo(x_RK.dtype).eps), self.limit))

    def hold(self, x_RK: Tensor, s: Scales) -> Encoded:
        return self.quantize(x_RK, Scales(visible(self._blocks(x_RK), s.scales)))

    def quantize(self, x_RK: Tensor, s: Scales) -> Encoded:
        x_RGB, scale = self._blocks(x_RK), s.scales.to(x_RK.dtype)
        top = (scale * self.limit).unsqueeze(-1)
        q = (x_RGB.clamp(-top, top) / scale.unsqueeze(-1) - 0.5).round().nan_to_num(0.0)
        lowest = 1 << (self.width - 1)
        codes = (q.to(torch.int8) + lowest).view(torch.uint8).flatten(1)
        return Encoded(layout.pack(codes, self.width), scale, None, None, x_RK.shape[1])

    def integers(self, e: Encoded) -> Tensor:
        """(R, K) int8 codes, unpacked."""
        return layout.unpack(e.codes, self.width, e.k).view(torch.int8) - (1 << (self.width - 1))

    def operand(self, e: Encoded, dtype: torch.dtype) -> Tensor:
        q_RGB = self._blocks(self.integers(e).to(e.scales.dtype))
        return ((q_RGB + 0.5) * e.scales.unsqueeze(-1)).flatten(1).to(dtype)

    def saturated(self, x_RK: Tensor, e: Encoded) -> Tensor:
        # half a step above the largest level: nearer values are only rounded
        return (self._blocks(x_RK).abs() > (e.scales * (self.limit + 0.5)).unsqueeze(-1)).flatten(1)

    def floored(self, e: Encoded) -> Tensor:
        return e.scales <= divide(e.scales.new_full((), torch.finfo(e.scales.dtype).eps), self.limit)
