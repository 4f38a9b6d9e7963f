"""Both backward GEMMs of a linear layer whose operands are quantised, in one op: dy is read once for both."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from aoquant.formats import Encoded, Operand, Scales

from . import backward
from .define import op
from .linear import dgrad_of_parts, wgrad_of_column_parts, wgrad_of_parts


class Gradients(NamedTuple):
    """dx (M, K) and dW (N, K)."""

    dx: Tensor
    dw: Tensor


def _shapes(a: Any) -> Gradients:
    (m, n), k = a.grad_MN.shape, a.w.k if isinstance(a.w, Encoded) else a.w.shape[1]
    return Gradients(a.grad_MN.new_empty(m, k), a.grad_MN.new_empty(n, k))


@op(_shapes)
def gradients(
    grad_MN: Tensor,
    w: Tensor | Encoded,
    w_operand: Operand | None,
    w_held: Scales | None,
    measured: Tensor | None,
    w_transposes: bool,
    dgrad_grad_as: Operand,
    w_as: Operand,
    x: Tensor | Encoded,
    x_operand: Operand | None,
    x_held: Scales | None,
    x_keeps: str,
    wgrad_grad_as: Operand,
    x_as: Operand,
    random: Tensor | None = None,
) -> Gradients:
    """`dgrad` and `wgrad`, or `wgrad_of_columns` where x_keeps is "columns", under the contract "aoquant".

    w_*: dgrad's arguments. x_*: wgrad's. x_keeps: what forward kept of x, one of `sides.Side.keeps`.
    """
    k = w.k if isinstance(w, Encoded) else w.shape[1]
    pairs = backward.Pair(dgrad_grad_as, w_as, k), backward.Pair(wgrad_grad_as, x_as, k)
    rows, columns = backward.both(grad_MN, *pairs, random) or (None, None)
    how = dgrad_grad_as, w_as, random, w_transposes, "aoquant", None
    dx = dgrad_of_parts(grad_MN, w, w_operand, w_held, measured, *how, rows)
    del rows
    if x_keeps == "columns":
        assert isinstance(x, Encoded)
        return Gradients(dx, wgrad_of_column_parts(grad_MN, x, wgrad_grad_as, x_as, random, "aoquant", None, columns))
    how = wgrad_grad_as, x_as, random, x_keeps == "square", "aoquant", None
    return Gradients(dx, wgrad_of_parts(grad_MN, x, x_operand, x_held, *how, columns))
