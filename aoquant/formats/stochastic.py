"""Formats for gradients: encodings whose values are right on average, because their rounding is random.

A gradient is summed over thousands of steps, so an error that averages out is worth more than a small one. Rounding to
nearest is the most exact encoding of one tensor, but it shrinks it: the slope of the decoded values over the true ones
is .99 for FP4. Here it is 1.

    mxfp4-sr   s = 2^(floor(log2 amax) - 2) * 4/3, so that amax / s lies in [3, 6) and nothing clips; each value goes
               up or down to a neighbouring code with the probability that makes its mean exact. The stored scale is
               the power of two; the 4/3 is the outer scale, so that a product of two operands carries
               (4/3)^2 = 16/9 in its epilogue. Source: Quartet (arXiv:2505.14669).
    nvfp4-sr   s = e4m3(amax / (6 * 16/17) / pts), pts = absmax / (448 * 6 * 16/17): rounding a scale to e4m3 takes
               at most 1/17 off it, so again nothing clips.
    ms-eden    codes round to nearest, and the block's scale makes up for what they lost: with v the block over its
               scale s and q its codes, the scale becomes s * <v, v> / <v, q>, which makes <v, v^> = <v, v> exactly,
               and only the rounding of that scale to e4m3 is random. s = e4m3(amax / (6 * 17/16 * .93) / pts),
               pts = absmax / (6 * 17/16 * .93 * 352): 352, because <v, v> / <v, q> is up to 1.22 and the scale must
               stay within 448. Less than half of nvfp4-sr's error. The remaining error is orthogonal to the block,
               and unbiased only after a random rotation. Source: Quartet II (arXiv:2601.22813).
    te-nvfp4-sr
               TransformerEngine's own rule: the scales are te-nvfp4's, made for rounding to nearest, and values beyond
               6 after scaling (about 4 % of normal ones) saturate, so the slope is .996. Block and outer scales and
               both candidates of every code are TransformerEngine's bytes; which candidate is taken follows from the
               numbers of `random.py`, not from the GPU's generator. Source: NVIDIA/TransformerEngine,
               cvt.rs.satfinite.e2m1x4 in `quantize_transpose_nvfp4`.

Published implementations of MS-EDEN differ and are not interchangeable: the correction spans 16, 32, 128 or 256 values,
the scale is or is not rounded before the codes are chosen, and ties go to even or away from zero. Here: per block of
16, after rounding the scale to e4m3 (at least 2^-9), half to even.

`transforms/rotation.py` has the rotation. None of these is a format for weights or activations of the forward: a
deployed layer does not draw.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from . import layout
from .base import Encoded, Format, Scales
from .blockscaled import E4M3_FLOOR, MX, NVFP4, PTS_FLOOR, block_scales
from .dialects import NVFP4Dialect
from .elements import E2M1_MAX, e2m1_steps, from_e2m1, to_e2m1, to_float8
from .random import Random
from .scales import absmax, divide, sum_by_pairs

E4M3_LEAST, E4M3_MAX = 2.0**-9, 448.0  # above zero
THIRDS = 4 / 3
SR_MAX = E2M1_MAX * 16 / 17  # of nvfp4-sr: amax over the unrounded scale
EDEN_MAX = E2M1_MAX / (17 / 16 * 0.93)  # of ms-eden
EDEN_SCALE = 352.0


class Randomized(Format):
    """A format whose encoding draws. `encode` takes where from: nothing here reads a global generator.

    largest: a block's amax over its scale before it is rounded. top_scale: the scale of the largest block. least: the
        smallest scale. Of NVFP4's blocks.
    """

    largest, top_scale, least = SR_MAX, E4M3_MAX, E4M3_FLOOR
    draws = True
    by_rows = False
    batch_invariant = False  # what a value draws follows from its place in the matrix

    def encode(self, x_RK: Tensor, held: Scales | None = None, random: Random | None = None) -> Encoded:
        """Codes and scales of x_RK; the same for the same x_RK and `random`, on every device. held: the scales of the
        whole, of which x_RK is a part.
        """
        if random is None:
            raise ValueError(
                f"{self.name} rounds at random: it is for the gradients of a training step, which brings its numbers"
            )
        return self.draw(x_RK, self.measure(x_RK) if held is None else held, random)

    def draw(self, x_RK: Tensor, s: Scales, random: Random) -> Encoded:
        """Codes of x_RK under measured scales."""
        raise NotImplementedError


@dataclass(frozen=True)
class MXStochastic(Randomized, MX):
    """MXFP4 with stochastic rounding; see above."""

    rule: str = "floor"
    name = "mxfp4-sr"

    def draw(self, x_RK: Tensor, s: Scales, random: Random) -> Encoded:
        y = (self._blocks(x_RK).float() * 0.75) * self._inverse(s.scales.view(torch.uint8)).unsqueeze(-1)
        codes = to_e2m1_stochastic(y.flatten(1), random)
        outer = torch.full((1, 1), THIRDS, dtype=torch.float32, device=x_RK.device)
        return Encoded(layout.pack(codes, 4), s.scales, None, outer, x_RK.shape[1])


@dataclass(frozen=True)
class NVFP4Stochastic(Randomized, NVFP4):
    """NVFP4 with stochastic rounding; see above."""

    name = "nvfp4-sr"

    def measure(self, x_RK: Tensor) -> Scales:
        amax = absmax(x_RK.reshape(1, -1)).float()
        outer = divide(amax, self.largest * self.top_scale).clamp(min=8 * PTS_FLOOR)
        return Scales(outer=outer.unsqueeze(-1))

    def draw(self, x_RK: Tensor, s: Scales, random: Random) -> Encoded:
        y, scale = self._scaled(x_RK, s)
        return Encoded(layout.pack(to_e2m1_stochastic(y.flatten(1), random), 4), scale, None, s.outer, x_RK.shape[1])

    def _scaled(self, x_RK: Tensor, s: Scales) -> tuple[Tensor, Tensor]:
        """(R, G, 16) values in units of their scale, and the e4m3 scales (R, G)."""
        assert s.outer is not None
        x_RGB = self._blocks(x_RK).float()
        scale = block_scales(x_RGB, s.outer, self.largest, self.least)
        return x_RGB * ((1.0 / s.outer) / scale.float()).unsqueeze(-1), scale


@dataclass(frozen=True)
class MSEden(NVFP4Stochastic):
    """NVFP4 whose scales make up for the rounding of the codes; see above."""

    largest, top_scale, least = EDEN_MAX, EDEN_SCALE, E4M3_LEAST
    name = "ms-eden"

    def draw(self, x_RK: Tensor, s: Scales, random: Random) -> Encoded:
        y, scale = self._scaled(x_RK, s)
        codes = to_e2m1(y.flatten(1))
        kept = sum_by_pairs(y * from_e2m1(codes).view_as(y))
        grown = torch.where(kept == 0, 1.0, sum_by_pairs(y * y) / kept)
        rounded = to_e4m3_stochastic(scale.float() * grown, random.in_blocks(self.block))
        return Encoded(layout.pack(codes, 4), rounded, None, s.outer, x_RK.shape[1])


@dataclass(frozen=True)
class TEStochastic(Randomized, NVFP4Dialect):
    """TransformerEngine's NVFP4 with stochastic rounding; see above."""

    dialect: str = "te"
    name = "te-nvfp4-sr"

    def draw(self, x_RK: Tensor, s: Scales, random: Random) -> Encoded:
        y, scale = self.scaled(x_RK, s)
        codes = to_e2m1_stochastic(y.flatten(1).clamp(-E2M1_MAX, E2M1_MAX), random)
        return Encoded(layout.pack(codes, 4), scale, None, s.outer, x_RK.shape[1])


def to_e2m1_stochastic(x: Tensor, random: Random) -> Tensor:
    """float32 of magnitudes up to 6 -> uint8 codes 0..15, up or down to a neighbour so that the mean is x. NaN as in
    `to_e2m1`.
    """
    steps, below, sign = e2m1_steps(x)
    return (_round(steps, random).to(torch.uint8) + below) | sign


def to_e4m3_stochastic(x: Tensor, random: Random) -> Tensor:
    """float32 0 .. 448 -> float8_e4m3fn, up or down to a neighbour so that the mean is x; NaN stays."""
    step = (x.clamp(min=E4M3_FLOOR).view(torch.int32) & 0x7F800000).view(torch.float32) / 8
    return to_float8(_round(x / step, random) * step, "e4m3")


def _round(t: Tensor, random: Random) -> Tensor:
    """t >= 0 to an integer, up with the probability that its fraction states: exactly, by one comparison."""
    down = t.floor()
    return down + (random.uniform(t) < t - down)


def parse(name: str) -> Format | None:
    """The stochastic format called `name`, if there is one."""
    return next((f for f in (MXStochastic(), NVFP4Stochastic(), MSEden(), TEStochastic()) if f.name == name), None)
