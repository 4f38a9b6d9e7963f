"""Both backward GEMMs of a linear layer whose operands are quantised, in one op: dy is read once for both.

A compiled step calls each op through the dispatcher, which takes the host as long as a launch. So what one op can make
is one op: dy's codes or operands, the transposed codes of W and x, and both products.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from aoquant.formats import Encoded, Scales

from . import backward, codec
from .backward import Kept, Pair
from .define import op
from .encoding import encode
from .linear import dgrad_of_parts, wgrad_of_parts


class Gradients(NamedTuple):
    """dx (M, K) and dW (N, K)."""

    dx: Tensor
    dw: Tensor


def _shapes(a: Any) -> Gradients:
    (m, n), k = a.grad_MN.shape, a.w.k
    return Gradients(a.grad_MN.new_empty(m, k), a.grad_MN.new_empty(n, k))


@op(_shapes)
def gradients(
    grad_MN: Tensor,
    w: Kept,
    dgrad: Pair,
    x: Kept,
    wgrad: Pair,
    random: Tensor | None = None,
    grad_held: Scales | None = None,
) -> Gradients:
    """`dgrad` and `wgrad`, with one encoding of dy where both read the same codes, and one pass over it where they
    multiply operands.
    """
    sides = _codes(grad_MN, dgrad, wgrad, grad_held)
    if sides is not None:
        dtype = grad_MN.dtype
        dx = backward.of_codes(sides.rows, w.columns(dgrad, dtype), dgrad, dtype)
        return Gradients(dx, backward.of_codes(sides.columns, x.columns(wgrad, dtype), wgrad, dtype))
    rows, columns = backward.both(grad_MN, w, dgrad, x, wgrad, random) or (None, None)
    dx = dgrad_of_parts(grad_MN, w, dgrad, random, None, rows)
    del rows
    return Gradients(dx, wgrad_of_parts(grad_MN, x, wgrad, random, None, columns))


class _Codes(NamedTuple):
    """Of dy along N, and along M."""

    rows: Encoded
    columns: Encoded


def _codes(grad_MN: Tensor, dgrad: Pair, wgrad: Pair, held: Scales | None) -> _Codes | None:
    """dy's codes, where both GEMMs read the same; None where each has its own."""
    a_as, moved = dgrad.a_as, None
    if held is not None:
        rows = encode.body(grad_MN, a_as, held)
    elif not backward.shares_codes(a_as, wgrad.a_as) or grad_MN.shape[1] % dgrad.multiple:
        return None
    else:
        rows, moved = codec.sides(a_as, grad_MN, wgrad.padded(grad_MN.shape[0]))
    return _Codes(rows, backward.transposed(rows, wgrad.a_as, wgrad.multiple, moved))
