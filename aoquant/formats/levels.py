"""Columns under given scales: round single columns of a matrix whose scales are fixed already.

`Format.quantize` takes whole blocks, because it also makes or stores their scales. Methods that compensate errors
(GPTQ) round one column, move its error to the columns that are left, and go on. By then the scales are fixed, and a
code is a choice among the few values that it can stand for. `Levels` lists these values by decoding them, for every
format in the same way. So a rounded column holds exactly the numbers that `decode` gives of the stored codes, and the
choice is the nearest deployed number: GridFlip's shifted grids, int4's fused rounding and e4m3's NaN need no code here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from . import layout
from .base import Encoded, Format


@dataclass
class Levels:
    """The values of all codes under the scales of an encoded matrix (R, K), L of them in each of G blocks.

    values_GRL: float32, ascending; Inf behind the last one. codes_GRL: the code of each, uint8. Values that several
    codes stand for have the lowest of these codes.
    """

    values_GRL: Tensor
    codes_GRL: Tensor
    block: int

    @cached_property
    def middles_GRL(self) -> Tensor:
        """Return the numbers between neighbouring values, up to which the lower one is nearer."""
        below, above = self.values_GRL[..., :-1], self.values_GRL[..., 1:]
        return torch.where(above.isinf(), torch.inf, below / 2 + above / 2)

    @classmethod
    def of(cls, format: Format, e: Encoded, dtype: torch.dtype) -> "Levels":
        """Return levels of e's blocks, as `format.decode(e, dtype)` gives them."""
        block, rows = format.block or e.k, len(e.codes)
        every = _every_code(format, e)
        calls = -(-len(every) // block)  # a block of 32 values shows 32 codes at once
        shown = every[torch.arange(calls * block, device=every.device) % len(every)].view(calls, block)
        values = []
        for codes_B in shown:
            codes = layout.pack(codes_B.repeat(e.k // block).expand(rows, -1).contiguous(), format.bits)
            made = format.decode(e._replace(codes=codes.view(e.codes.dtype)), dtype).float()
            values.append(made.view(rows, -1, block).transpose(0, 1))
        v_GRL = torch.cat(values, -1)[..., : len(every)]
        v_GRL, order = torch.where(v_GRL.isfinite(), v_GRL, torch.inf).sort(stable=True, dim=-1)
        again = torch.nn.functional.pad(v_GRL[..., 1:] == v_GRL[..., :-1], (1, 0))
        v_GRL, moved = v_GRL.masked_fill(again, torch.inf).sort(stable=True, dim=-1)
        return cls(v_GRL.contiguous(), every[order.gather(-1, moved)], block)

    def nearest(self, w_R: Tensor, column: int, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Return (values, codes) of one column of float32 values, (R,) each; of two values as near, the smaller one.

        rows: which ones these are.
        """
        values, codes, middles = (
            t[column // self.block, rows] for t in (self.values_GRL, self.codes_GRL, self.middles_GRL)
        )
        index = torch.searchsorted(middles, w_R.unsqueeze(-1))
        return values.gather(-1, index).squeeze(-1), codes.gather(-1, index).squeeze(-1)

    @classmethod
    def cat(cls, parts: "Sequence[Levels]") -> "Levels":
        """Return the levels of several matrices, one below the other."""
        if len(parts) == 1:
            return parts[0]
        values, codes = (torch.cat([getattr(p, name) for p in parts], 1) for name in ("values_GRL", "codes_GRL"))
        (block,) = {p.block for p in parts}
        return cls(values, codes, block)


def packed(format: Format, e: Encoded, codes_RK: Tensor) -> Encoded:
    """e with other codes, one uint8 for each value, as `Levels` gives them."""
    return e._replace(codes=layout.pack(codes_RK.contiguous(), format.bits).view(e.codes.dtype))


def _every_code(format: Format, e: Encoded) -> Tensor:
    """Return all codes that `quantize` can write, as bytes (uint8) before they are packed."""
    if e.codes.dtype == torch.int8:
        low, high = format.limits
        return torch.arange(low, high + 1, dtype=torch.int8, device=e.codes.device).view(torch.uint8)
    return torch.arange(1 << format.bits, dtype=torch.int16, device=e.codes.device).to(torch.uint8)
