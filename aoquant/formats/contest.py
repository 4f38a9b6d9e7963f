"""A contest of grids: every block is rounded to several candidates, and keeps the one that errs least.

NVFP4 gives a block one scale, made from its largest value, although a slightly larger or smaller one often errs less on
all the others. Four-over-six and GridFlip try a few and compare. `four_over_six.py` and `gridflip.py` define their
candidates, a scale and perhaps a flipped grid. This file compares them, in float32 and in exactly this order, because
two candidates are often a rounding error apart and every device has to choose the same:

    y = x * (1 / (s * (1 / T)));  q = e2m1(flipped ? -y - c : y);  v = s~ * q + c * min(s~, 0)
    d = (v * amax) / 1536 - x;    error = d^2, summed one after the other

with T = 1536 / amax, s~ = -s where flipped, else s. Where amax is below 2^-60 or above 2^60, x and amax are multiplied
by 2^100 or 2^-100 first, since squares would leave float32's range. Values stand k-major, (values of a block, blocks),
so that the sum is over rows. A candidate that would decode to Inf is out (with amax below 2^127 none can); the first
one is never out.

An inverse that overflows is the largest float32, as in TransformerEngine, so a block too small for any scale keeps
saturated codes under scale 0: they decode to zeros, and a report can tell them from a block of zeros.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .elements import FLOAT32_MAX, from_float8, nearest_e2m1, to_e2m1, to_float8
from .scales import quotient

TOP = 1536.0  # 6 * 256: the largest block's scale for a top of 4 is then 384, which e4m3 holds
AMAX_FLOOR = 2.0**-133  # smallest bfloat16: below it amax / 1536 would have hardly a bit left
# where squared errors would leave float32's range, and what brings them back
_SMALL, _LARGE, _POWER = 2.0**-60, 2.0**60, 2.0**100

METRICS = ("mse", "mae", "absmax")


@dataclass
class Outer:
    """The scales of a whole tensor, made from its absmax (), or of the row of each block, made from its row's absmax
    (B,); float32.

    amax, up, down: absmax, 1536 / absmax and its inverse, of the tensor as the contest sees it, multiplied by `power`.
        t: the factor of decoding. All have amax's shape.
    """

    amax: Tensor
    power: Tensor = field(init=False)
    up: Tensor = field(init=False)
    down: Tensor = field(init=False)
    t: Tensor = field(init=False)

    def __post_init__(self) -> None:
        amax = self.amax.float()
        amax = amax.clamp(min=AMAX_FLOOR).masked_fill(amax == 0, TOP)  # zeros alone: t = 1
        self.t = quotient(amax, TOP)
        self.power = torch.ones_like(amax).masked_fill(amax < _SMALL, _POWER).masked_fill(amax > _LARGE, 1 / _POWER)
        self.amax = amax * self.power
        self.up = torch.full_like(amax, TOP) / self.amax
        self.down = self.up.reciprocal()

    def inverse(self, s_B: Tensor) -> Tensor:
        """The factor of a block's values before they are rounded, for its unsigned scale."""
        return (s_B * self.down).reciprocal().clamp(max=FLOAT32_MAX)


@dataclass
class Contest:
    """x_EB: blocks of E values, times `outer.power`. present: (E, B) bool, or None for all. shift: c, or one per block
    (B,).
    """

    x_EB: Tensor
    outer: Outer
    metric: str = "mse"
    shift: float | Tensor = 0.0
    present: Tensor | None = None
    _scale: Tensor | None = None
    _error: Tensor | None = None

    def enter(self, s_B: Tensor, *, flipped: bool = False) -> None:
        """One candidate: an unsigned scale for every block, of e4m3's values. An earlier one stays where it errs no
        more.
        """
        signed = torch.where(s_B > 0, -s_B, s_B) if flipped else s_B  # never -0.0
        v_EB = nearest_e2m1(self._scaled(s_B, flipped)).mul_(signed)
        if flipped:
            v_EB += self.shift * signed.clamp(max=0)
        if self._scale is None or self._error is None:
            self._scale, self._error = signed, self._errors(v_EB)
            return
        overflows = (v_EB.abs().amax(0) * self.outer.t).isinf()
        error = self._errors(v_EB)
        better = (error < self._error) & ~overflows
        self._scale = torch.where(better, signed, self._scale)
        self._error = torch.where(better, error, self._error)

    def won(self, scale_B: Tensor) -> None:
        """Scales that are held, negative where flipped: there is no contest."""
        self._scale = scale_B

    def result(self, finite: Tensor) -> tuple[Tensor, Tensor]:
        """(signed e4m3 scales (B,), codes (E, B) uint8). finite: blocks without NaN or Inf; the others get scale NaN
        and codes 0.
        """
        assert self._scale is not None
        signed = torch.where(finite, self._scale, torch.nan)
        y_EB = self._scaled(signed.abs(), False)
        return to_float8(signed, "e4m3"), to_e2m1(torch.where(signed < 0, -y_EB - self.shift, y_EB))

    def _scaled(self, s_B: Tensor, flipped: bool) -> Tensor:
        y_EB = self.x_EB * self.outer.inverse(s_B)
        return y_EB.neg_().sub_(self.shift) if flipped else y_EB

    def _errors(self, v_EB: Tensor) -> Tensor:
        d_EB = quotient(v_EB.mul_(self.outer.amax), TOP).sub_(self.x_EB)
        d_EB = d_EB.square_() if self.metric == "mse" else d_EB.abs_()
        if self.present is not None:
            d_EB = torch.where(self.present, d_EB, 0.0)
        if self.metric == "absmax":
            return d_EB.amax(0)
        total = d_EB[0].clone()
        for d_B in d_EB[1:]:
            total += d_B
        return total


def e4m3(x: Tensor) -> Tensor:
    """float32 -> the nearest e4m3 value, saturating, as float32."""
    return from_float8(to_float8(x, "e4m3"), torch.float32)
