"""The sides of input and weight that a layer keeps for backward.

`LinearRecipe.save` says what forward keeps, and `Side.keeps` what that means for one operand:

    keeps       forward keeps                         backward's operand
    "rows"      the codes that fprop multiplied       their values, encoded again along the other axis
    "square"    the same                              the same codes, transposed: square tiles, or one scale for all
    "columns"   codes along the batch, of an input    those
    "values"    the high-precision tensor             encoded in backward, from the original or from fprop's values

"rows" of an input and "values" of a weight are what presets such as "quartet" keep. With save="col" an input costs what
its column side costs, or less: from the "original" the columns, from "forward" the smaller of rows and columns.
save="hp" keeps values alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from aoquant import ops
from aoquant.formats import Encoded, HighPrecision, Operand, Scales
from aoquant.formats.operand import DELAYED
from aoquant.layers import law
from aoquant.ops import backward as gemms
from aoquant.parallel.shards import Shards

SAVES = ("row", "col", "hp")


@dataclass(frozen=True)
class Side:
    """The operand of a backward GEMM that is no gradient.

    keeps: as above. forward: its operand in fprop; None where backward starts from the original, or fprop does not
        quantise it.
    grad_as, backward: the two operands of the backward GEMM.
    reads_values: whether backward reads a weight itself for other reasons.
    """

    keeps: str
    forward: Operand | None
    grad_as: Operand | None
    backward: Operand | None
    reads_values: bool = False

    @classmethod
    def of_input(
        cls, save: str, source: str, forward: Operand | None, grad_as: Operand | None, backward: Operand | None
    ) -> Side:
        """The side of its input that a recipe keeps."""
        if save == "row":
            return cls("rows", forward, grad_as, backward)
        same = _same_codes(forward, backward)
        if source == "original" or same or forward is None or isinstance(forward.format, HighPrecision):
            if save == "hp" or backward is None or backward.draws:
                return cls("values", None, grad_as, backward)
            return cls("square" if same else "columns", None, grad_as, backward)
        if save == "hp":
            return cls("values", forward, grad_as, backward)
        smaller = backward is not None and not backward.draws and _bits(backward) < _bits(forward)
        return cls("columns" if smaller else "rows", forward, grad_as, backward)

    @classmethod
    def of_weight(
        cls,
        save: str,
        source: str,
        forward: Operand,
        grad_as: Operand | None,
        backward: Operand | None,
        reads_values: bool,
    ) -> Side:
        """The side of its weight that a recipe keeps. reads_values: whether backward reads the weight anyway."""
        same = _same_codes(forward, backward)
        original = source == "original" or same or isinstance(forward.format, HighPrecision)
        if save == "col" and not reads_values:
            if same:
                return cls("square", None, grad_as, backward)
            if not original:
                return cls("rows", forward, grad_as, backward)
        made_of = None if original and save != "row" else forward
        return cls("values", made_of, grad_as, backward, reads_values)

    @cached_property
    def contract(self) -> str:
        """Of the backward GEMM."""
        return law.contract(self.grad_as, self.backward)

    @cached_property
    def pair(self) -> ops.Pair | None:
        """Both operands of the backward GEMM; None where it multiplies in high precision."""
        if self.grad_as is None or self.backward is None:
            return None
        return ops.Pair(self.grad_as, self.backward, self.contract)

    @cached_property
    def keeps_rows(self) -> bool:
        """Whether forward keeps the codes that it multiplied."""
        return self.keeps in ("rows", "square")

    @cached_property
    def multiple(self) -> int:
        """Columns are padded to a multiple of it."""
        assert self.grad_as is not None and self.backward is not None
        return ops.contraction(self.grad_as, self.backward, self.contract)

    def keeps_codes(self, fixed: bool) -> bool:
        """Whether forward keeps codes of a weight. fixed: they are there anyhow."""
        return self.keeps != "values" or (fixed and self.forward is not None and not self.reads_values)

    def columns(self, x_RK: Tensor, rows: Tensor | Encoded, parts: Shards | None = None) -> Encoded:
        """The column side of x, whose codes in forward are `rows`. parts: of x, that this rank has."""
        assert self.backward is not None
        if isinstance(rows, Encoded) and self.forward is not None:
            x_RK = ops.decode(rows, self.forward, x_RK.dtype)
        if parts is not None:
            return gemms.columns(x_RK, self.backward, self.multiple, parts.wgrad.b)
        made = ops.encode(x_RK, None, self.backward, multiple=self.multiple).col
        assert made is not None
        return made.codes

    def kept(
        self, matrix: Tensor | Encoded, held: Scales | None, measured: Tensor | None = None, keeps: str = ""
    ) -> ops.Kept:
        """What forward kept, for the backward GEMM. keeps: where `matrix` is another side than this one keeps."""
        if isinstance(matrix, Tensor) and matrix.dim() != 2:
            matrix = matrix.reshape(-1, matrix.shape[-1])
        return ops.Kept(matrix, self.forward, held, measured, keeps or self.keeps)


def _same_codes(forward: Operand | None, backward: Operand | None) -> bool:
    """Whether the column side has the transposed codes of the row side."""
    if (
        forward is None
        or backward is None
        or forward.transform is not None
        or forward.scales not in ("dynamic", DELAYED)
    ):
        return False
    return forward.format.square and forward.name == backward.name


def _bits(operand: Operand) -> float:
    """Stored bits of a value, in a matrix of many blocks."""
    e = operand.planned(torch.empty(512, 512, dtype=torch.bfloat16, device="meta"))
    return 8 * sum(t.numel() * t.element_size() for t in e.tensors if t is not None) / 512**2
