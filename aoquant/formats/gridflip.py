"""GridFlip: four-over-six with a second grid, marked by the sign of the block's scale.

An e4m3 scale has a sign bit, and NVFP4 never uses it. Here a negative scale says that the block's grid is Q - c instead
of Q, with c = 1/4: finer around zero, and longer on one side. It costs nothing: 4.5 bits a weight, as before.

    value = t * (s~ * q + c * min(s~, 0))            t = amax / 1536, s~ the signed scale

so a flagged block decodes q to -(q + c) * |s| * t. The candidates of the contest (`contest.py`), in this order:

    "base"    Q with s6, Q with s4, as four-over-six; flipped with s = e4m3(a / (v + c) * T), v = 6, then 4
    "sided"   and flipped with s = e4m3(max(pos / (v - c), neg / (v + c)) * T), v = 6, then 4: pos and neg are the
              block's largest positive and negative magnitude, for the grid's short and its long side
    "search"  instead, every e4m3 scale from 4 codes below to 8 above s6's, at most 126: Q with all of them, then
              flipped with all

Ties stay with the earlier candidate, so an unflipped block wins them. All efforts share one decode. "alternating" turns
the sign of c in every other block along K, which removes the mean that the shifted grid adds; a matrix is then cut
along K at multiples of 32.

How exact is an operand? q + c is an odd multiple of 1/4, up to 25/4 = 5 bits, and s has 4: of 9 bits bfloat16 keeps 8.
Codes +6 with the significands 11, 13, 15 (of 8..15) and -6 with 13 and 15 are rounded in a bfloat16 operand, half to
even; everything else is exact, and in float16 and float32 all is. That rounding belongs to the format's operand.
`decode` rounds once, from float32.

The byte 0x80 is never written and decodes to 0; 0x7F and 0xFF decode to NaN. The amax is that of the tensor which is
quantised, after any transform.
"""

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Encoded
from .blockscaled import e2m1_values
from .contest import Contest, Outer, e4m3
from .elements import E2M1_MAX, FLOAT8, from_float8, to_float8
from .fixed import fixed_name
from .four_over_six import FourOverSix, absmax_of
from .scales import float32

_LEAST = 0.0001  # smaller shifts are not written without an exponent, and would round away
_NAME = re.compile(r"gridflip(?:-(sided|search))?(?:-c(\d+\.\d+))?(-alternating)?(-16x16)?(-row)?")
EFFORTS = ("base", "sided", "search")
_FOUR = 4.0
_BELOW, _ABOVE, _LAST = 4, 8, 126  # e4m3 codes around that of a / 6; 127 is NaN


@dataclass(frozen=True)
class GridFlip(FourOverSix):
    """e2m1 codes on one of two grids, a signed e4m3 scale per 16 values or per 16 x 16, an outer float32 scale."""

    effort: str = "base"
    c: float = 0.25
    alternating: bool = False
    standard = ""  # its scales have signs

    def __post_init__(self) -> None:
        if self.metric != "mse":
            raise ValueError(f"gridflip: blocks are compared by their squared error alone, got metric={self.metric!r}")
        super().__post_init__()
        number = isinstance(self.c, int | float) and not isinstance(self.c, bool)
        if self.effort not in EFFORTS or not number or not _LEAST <= self.c < 2.0:
            raise ValueError(
                f"gridflip: effort is one of {', '.join(EFFORTS)} and c a shift of at least {_LEAST} and less than 2, "
                f"got effort={self.effort!r}, c={self.c!r}"
            )
        object.__setattr__(self, "c", float(self.c))  # as the name says it

    @classmethod
    def parse(cls, name: str) -> "GridFlip | None":
        """The format called `name`; None when it is no GridFlip format's name."""
        if (match := _NAME.fullmatch(name)) is None:
            return None
        effort, c, alternating, tile, row = match.groups()
        if (c is not None and not _LEAST <= float(c) < 2.0) or (tile and row):
            return None
        return cls(
            tile=16 if tile else 1,
            effort=effort or "base",
            c=0.25 if c is None else float(c),
            alternating=bool(alternating),
            outer="row" if row else "dynamic",
        )

    @property
    def name(self) -> str:
        parts = (
            "" if self.effort == "base" else f"-{self.effort}",
            "" if self.c == 0.25 else f"-c{self.c!r}",
            "-alternating" if self.alternating else "",
            "-16x16" if self.tile > 1 else "",
            "-row" if self.outer == "row" else "",
        )
        return f"gridflip{''.join(parts)}{fixed_name(self.fixed)}"

    @property
    def shifts(self) -> tuple[float, float]:
        return self.c, -self.c if self.alternating else self.c

    @property
    def family(self) -> str:
        return self.name

    @property
    def period(self) -> int:
        return 2 * self.block if self.alternating else self.block

    def operand(self, e: Encoded, dtype: torch.dtype) -> Tensor:
        s_RG = self._signed(e)
        v_RGB = self._blocks(e2m1_values(e)).mul_(s_RG.unsqueeze(-1))
        return v_RGB.add_((self._shift(s_RG) * s_RG.clamp(max=0)).unsqueeze(-1)).flatten(1).to(dtype)

    def split(self, e: Encoded) -> tuple[Encoded, Tensor]:
        """The part that an FP4 tensor core can multiply, and the rest, which is added.

        Returns an `Encoded` of plain four-over-six codes with unsigned scales (in flagged blocks the codes' sign bit is
        turned), and C (R, G) float32, -c |s| in flagged blocks and 0 elsewhere: operand = operand(plain) + C, so that

            X W^T = t * (X plain^T + Xbar C^T),  Xbar (M, G) the sums of X over each block: K / 16 more columns.

        C is exact in bfloat16 when c is a power of two. Xbar must not be rounded to fewer bits than X has.
        """
        s_RG = self._signed(e)
        flagged = (s_RG < 0).repeat_interleave(self.block // 2, 1)
        codes = torch.where(flagged, e.codes ^ 0x88, e.codes)
        scale = (e.scales.view(torch.uint8) & 0x7F).view(FLOAT8["e4m3"])
        return Encoded(codes, scale, None, e.outer, e.k), self._shift(s_RG) * s_RG.clamp(max=0)

    @property
    def plain(self) -> FourOverSix:
        """The format of what `split` returns."""
        return FourOverSix(tile=self.tile, outer=self.outer)

    def _enter(self, contest: Contest) -> None:
        outer, a_B = contest.outer, absmax_of(contest.x_EB)
        b_B = self._ratio(a_B, E2M1_MAX, outer)
        if self.effort == "search":
            middle = to_float8(b_B, "e4m3").view(torch.uint8).int()
            steps = [(middle + d).clamp(0, _LAST).to(torch.uint8) for d in range(-_BELOW, _ABOVE + 1)]
            for flipped in (False, True):
                for code in steps:
                    contest.enter(from_float8(code.view(FLOAT8["e4m3"]), torch.float32), flipped=flipped)
            return
        super()._enter(contest)
        c = float32(self.c)
        for v in (E2M1_MAX, _FOUR):
            contest.enter(e4m3(self._ratio(a_B, v + c, outer)), flipped=True)
        if self.effort == "sided":
            pos, neg = contest.x_EB.amax(0).clamp_(min=0), contest.x_EB.amin(0).neg_().clamp_(min=0)
            if isinstance(contest.shift, Tensor):
                turned = contest.shift < 0
                pos, neg = torch.where(turned, neg, pos), torch.where(turned, pos, neg)
            for v in (E2M1_MAX, _FOUR):
                pair = self._ratio(pos, v - c, outer), self._ratio(neg, v + c, outer)
                contest.enter(e4m3(torch.maximum(*pair)), flipped=True)

    def _contest(self, x_EB: Tensor, outer: Outer, rows: int, k: int) -> Contest:
        shift = self._shift(x_EB.new_empty(-(-rows // self.tile), k // self.block))
        shift_B = shift.expand(-(-rows // self.tile), -1).reshape(-1) if isinstance(shift, Tensor) else shift
        return Contest(x_EB, outer, self.metric, shift_B, self._present(rows, k, x_EB.device))

    def _shift(self, s_RG: Tensor) -> float | Tensor:
        """c, or c and -c in turn for the blocks of a row (1, G)."""
        c = float32(self.c)
        if not self.alternating:
            return c
        odd = torch.arange(s_RG.shape[1], device=s_RG.device) % 2 == 1
        return torch.full((1, s_RG.shape[1]), c, dtype=torch.float32, device=s_RG.device).masked_fill(odd, -c)

    def _off_centre(self, x_RGB: Tensor, step: Tensor, s_RG1: Tensor) -> Tensor:
        shift = self._shift(s_RG1.squeeze(-1))
        shift = shift.unsqueeze(-1) if isinstance(shift, Tensor) else shift
        return torch.where(s_RG1 < 0, x_RGB + shift * step, x_RGB)
