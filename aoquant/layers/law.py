"""The law of backward: which two operands may meet in one of its GEMMs.

    dgrad  dx = dy W       grad_output, weight       both along N
    wgrad  dW = dy^T x     grad_output, input        both along the rows of the batch

Both operands stay in high precision, or both belong to one family. A transform in front of them has to cancel in the product: the same matrix on
both sides, and its own inverse transposed.
"""

from __future__ import annotations

from collections.abc import Hashable

from aoquant.formats import Operand


def why_not(gemm: str, first: Operand | None, second: Operand | None) -> str | None:
    """Why the two cannot be the operands of `gemm`, "dgrad" or "wgrad"; None when they can."""
    t = first.transform if first is not None else None
    if t is not None and (t.sided or t.fitted):
        assert first is not None
        return f"{t} does not cancel in {gemm}'s product: use rht{t.size}+{first.format.name}"
    if _family(first) != _family(second):
        names = " and ".join(f.name if f else "high precision" for f in (first, second))
        return f"the two operands of {gemm} have one format, or both stay in high precision, got {names}"
    return None


def _family(operand: Operand | None) -> Hashable:
    """What both operands of a GEMM have in common: today, every operand is a family of its own."""
    return operand
