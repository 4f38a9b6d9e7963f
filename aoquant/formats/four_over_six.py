"""Four-over-six: NVFP4 whose blocks choose whether their largest value is coded as 6 or as 4.

e2m1's largest step is the one from 4 to 6. A block scaled so that its largest value becomes 4 never uses it, and pays
with coarser steps below; the encoder tries both and keeps the smaller error ("4/6": Cook et al., "Four Over Six: More
Accurate NVFP4 Quantization with Adaptive Block Scaling", 2025). The bytes are NVFP4's: nothing is stored but the scale
that won.

    T = 1536 / amax;  b = a / 6 * T;  s6 = e4m3(b);  s4 = e4m3(1.5 * b);  the contest of `contest.py`, s6 first
    value = (amax / 1536) * (s * code)

amax is the largest finite magnitude of the tensor, 1536 = 6 * 256: with NVFP4's 448 the scale for 4 of the largest
block would not fit into e4m3. Divisions are IEEE's. Blocks are 16 values along K, or tiles of 16 x 16 (the last may be
short), whose error is summed row by row. A block that holds NaN or Inf has the scale NaN (0x7F), and the others do not
notice.

With stochastic rounding a choice by the error that was realised is biased; there is no such format, and its name is
refused.

"fouroversix-row" takes amax of each row: a row's codes then do not depend on the rows beside it, which an activation's
should not.

`Scales.outer` is amax itself, not amax / 1536, whose rounding loses it. `Scales.scale`, which only a layer that trains
on from codes holds, are the scales that won.
"""

import re
from dataclasses import dataclass, field, replace
from functools import reduce

import torch
from torch import Tensor

from . import layout
from .base import Encoded, Scales
from .blockscaled import e2m1_times
from .contest import METRICS, TOP, Contest, Outer, e4m3
from .elements import E2M1_MAX, from_float8, rounding_limit
from .fixed import OneScale, constants, fixed_name
from .scales import absmax, quotient, solved

_NAME = re.compile(r"fouroversix(?:-(mae|absmax))?(-16x16)?(-row)?")
_SMALLEST = 2.0**-9  # positive e4m3


@dataclass(frozen=True)
class FourOverSix(OneScale):
    """e2m1 codes, an e4m3 scale per 16 values or per `tile` x 16, an outer float32 scale; metric "mse", "mae" or
    "absmax".

    outer: "dynamic", from the absmax of the tensor, or "row", from that of each row. fixed: (amax,), a constant instead
        of the tensor's own.
    """

    metric: str = "mse"
    tile: int = 1
    outer: str = field(default="dynamic", kw_only=True)
    bits = 4
    finite_only = True

    def __post_init__(self) -> None:
        if self.outer not in ("dynamic", "row") or (self.outer == "row" and (self.tile > 1 or self.fixed)):
            raise ValueError(
                f"{type(self).__name__}: outer is 'dynamic', or 'row' with tiles of one row and no constant, "
                f"got outer={self.outer!r}, tile={self.tile!r}, fixed={self.fixed!r}"
            )
        if self.tile not in (1, 16):
            raise ValueError(f"{type(self).__name__}: tile must be 1 or 16 rows, got {self.tile!r}")
        if self.metric not in METRICS:
            raise ValueError(f"FourOverSix: metric is one of {', '.join(METRICS)}, got {self.metric!r}")

    @classmethod
    def parse(cls, name: str) -> "FourOverSix | None":
        """The format called `name`; None when it is no four-over-six format's name."""
        if name.startswith("fouroversix") and name.endswith("-sr"):
            raise ValueError(
                f"{name!r}: four-over-six keeps the candidate that erred less, and under stochastic rounding that choice is biased: "
                "use 'nvfp4-sr' where gradients have to be unbiased, or 'fouroversix' with rounding to nearest"
            )
        if (match := _NAME.fullmatch(name)) is None:
            return None
        metric, tile, row = match.groups()
        return None if tile and row else cls(metric or "mse", 16 if tile else 1, outer="row" if row else "dynamic")

    @property
    def name(self) -> str:
        metric = "" if self.metric == "mse" else f"-{self.metric}"
        row = "-row" if self.outer == "row" else ""
        return f"fouroversix{metric}{'-16x16' if self.tile > 1 else ''}{row}{fixed_name(self.fixed)}"

    element = "e2m1"
    block = 16  # no property: every pass over blocks asks
    block_scale = torch.float8_e4m3fn
    effort = ""  # which flipped candidates a block has, of GridFlip

    @property
    def family(self) -> str:
        return "nvfp4"

    @property
    def standard(self) -> str:
        return "nvfp4" if self.tile == 1 else ""

    @property
    def beside(self) -> "FourOverSix":
        return self if self.fixed else replace(self, tile=1, outer="row")

    @property
    def tile_rows(self) -> int:
        return self.tile

    @property
    def widest(self) -> str:
        return "row" if self.outer == "row" else "tensor"

    def measure(self, x_RK: Tensor) -> Scales:
        if self.fixed:
            return Scales(outer=constants(self.fixed, x_RK.device)[0])
        # some rows at a time: a copy, in which zeros replace NaN and Inf
        finite = (x.nan_to_num(0.0, 0.0, 0.0) for x in x_RK.split(_rows(x_RK)))
        if self.outer == "row":
            return Scales(outer=torch.cat([absmax(x.unsqueeze(1)).float() for x in finite]))
        # torch.cat would take part in autocast
        return Scales(outer=reduce(torch.maximum, [absmax(x.reshape(1, 1, -1)) for x in finite]).float())

    def held(self, e: Encoded) -> Scales:
        """With the scales of the blocks: another candidate may give the same values by other codes."""
        assert e.outer is not None
        outer = e.outer if self.outer == "row" else e.outer[:1]
        return Scales(e.scale, outer=solved(lambda amax: quotient(amax, TOP), outer * TOP, outer))

    def quantize(self, x_RK: Tensor, s: Scales) -> Encoded:
        assert s.outer is not None
        rows, k = x_RK.shape
        row = self.outer == "row"  # which has an amax for each of its blocks (B,), and the tensor one ()
        amax = s.outer.expand(-1, k // self.block).reshape(-1) if row else s.outer.reshape(())
        x_EB, outer = self._fold(x_RK.float()), Outer(amax)
        finite = x_EB.isfinite().all(0)
        contest = self._contest(x_EB.mul(outer.power), outer, rows, k)
        if s.scale is None:
            self._enter(contest)
        else:
            contest.won(from_float8(s.scale, torch.float32).reshape(-1))
        scale, codes = contest.result(finite)
        packed = layout.pack(self._unfold(codes, rows, k), 4)
        t = Outer(s.outer).t if row else outer.t.view(1, 1)
        return Encoded(packed, scale.view(-1, k // self.block), None, t, k)

    def operand(self, e: Encoded, dtype: torch.dtype) -> Tensor:
        return e2m1_times(self, e, self._signed(e)).to(dtype)

    def saturated(self, x_RK: Tensor, e: Encoded) -> Tensor:
        """Beyond the largest code by half a step and more; a block too small for a scale is flushed to zeros, not
        clipped.
        """
        assert e.outer is not None
        s_RG1 = self._signed(e).unsqueeze(-1)
        step = s_RG1.abs() * e.outer.unsqueeze(-1)
        x_RGB = self._blocks(x_RK).float()
        clipped = self._off_centre(x_RGB, step, s_RG1).abs() > step * rounding_limit("e2m1")
        return (clipped & (step > 0)).flatten(1)

    def floored(self, e: Encoded) -> Tensor:
        index = self._fold(layout.unpack(e.codes, 4, e.k) & 7).amax(0).view(e.scales.shape)
        s = from_float8(e.scales, torch.float32).abs()
        return ((s == 0) & (index > 0)) | ((s == _SMALLEST) & (index > 0) & (index < 6))

    def _enter(self, contest: Contest) -> None:
        """All candidates of every block."""
        b_B = self._ratio(absmax_of(contest.x_EB), E2M1_MAX, contest.outer)
        contest.enter(e4m3(b_B))
        contest.enter(e4m3(b_B * 1.5))

    def _contest(self, x_EB: Tensor, outer: Outer, rows: int, k: int) -> Contest:
        return Contest(x_EB, outer, self.metric, present=self._present(rows, k, x_EB.device))

    @staticmethod
    def _ratio(a_B: Tensor, v: float, outer: Outer) -> Tensor:
        """a / v * T: the scale, not yet rounded, under which a is coded as v."""
        return quotient(a_B, v) * outer.up

    def _off_centre(self, x_RGB: Tensor, step: Tensor, s_RG1: Tensor) -> Tensor:
        """x, or its distance from the middle of its block's grid."""
        return x_RGB

    def _signed(self, e: Encoded) -> Tensor:
        """(R, G) float32 scales with their sign."""
        return self.spread(from_float8(e.scales, torch.float32), e.codes.shape[0])

    def _fold(self, t_RK: Tensor) -> Tensor:
        """(R, K) -> (E, B), a block's values in the order of its rows; zeros below the last row."""
        h, b = self.tile, self.block
        missing = -t_RK.shape[0] % h
        t = torch.nn.functional.pad(t_RK, (0, 0, 0, missing)) if missing else t_RK
        groups = t.shape[1] // b
        return t.reshape(-1, h, groups, b).permute(1, 3, 0, 2).reshape(h * b, t.shape[0] // h * groups)

    def _unfold(self, t_EB: Tensor, rows: int, k: int) -> Tensor:
        """Inverse of `_fold`."""
        h, b = self.tile, self.block
        return t_EB.view(h, b, -(-rows // h), k // b).permute(2, 0, 3, 1).reshape(-(-rows // h) * h, k)[:rows]

    def _present(self, rows: int, k: int, device: torch.device) -> Tensor | None:
        """(E, B) bool: values that are there; None when all are."""
        if rows % self.tile == 0:
            return None
        return self._fold(torch.ones(rows, 1, dtype=torch.bool, device=device).expand(rows, k))


def absmax_of(x_EB: Tensor) -> Tensor:
    """(B,): the largest magnitude of every block."""
    return torch.maximum(x_EB.amax(0), -x_EB.amin(0)).abs()


def _rows(x_RK: Tensor) -> int:
    """Rows to look at together: all, but on a CPU about a million values."""
    return max(1, x_RK.shape[0] if x_RK.device.type != "cpu" else (1 << 20) // max(1, x_RK.shape[1]))
