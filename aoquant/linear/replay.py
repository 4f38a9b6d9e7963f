"""Repeat a call of a layer, and its backward, without their Python.

Nothing that the page (function.py) decides changes between two calls that are alike: recipe, shapes, strides, dtypes,
device, which gradients are asked for, and what is shared with other layers. So a call is recorded and repeated
(`ops.repeat`), forward and backward apart. Layers with equal calls share their programs.

A call that is not ordinary takes the page: as there, and where the layer holds scales, transforms or codes beside its
weight, or where its weight is sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from aoquant.formats import Encoded
from aoquant.linear.saved import Layout, flat
from aoquant.ops import repeat, router

Left = tuple[tuple[int, bool] | None, ...]


class _Shared:
    """Stand for `InputCodes` in one forward: hold the codes that were found, and those that are left."""

    def __init__(self, found: Encoded | None) -> None:
        self.found = found
        self.left: tuple[Encoded, bool] | None = None  # codes, and whether autograd keeps them
        self.parts, self.layers = () if found is None else (found,), ()

    def take(self, layer: int) -> Encoded | None:
        """Return the codes that were found."""
        return self.found

    def leave(self, encoded: Encoded, layer: int, kept: bool) -> None:
        """Hold what is left, for the layer's own `InputCodes`."""
        self.left = encoded, kept


class Note(NamedTuple):
    """Hold how to read what a forward returns: y, the saved tensors, and the codes that are left for other layers.

    layout, saved: of the saved tensors, and their count. left: (K, whether autograd keeps them) of the codes of rows
    and of columns, None where there are none. backward: what repeats the backwards of such forwards.
    """

    layout: Layout
    saved: int
    left: Left
    backward: repeat.Repeats


_forwards = repeat.Repeats()


def forward(
    multiply: Callable[..., Any], x: Tensor, w: Tensor | None, bias: Tensor | None, given: Any, needs: Any
) -> tuple[Tensor, Sequence[Tensor | None], Layout, repeat.Repeats | None]:
    """Return (y, the tensors that backward reads, their layout, what repeats the backward) of a call of `multiply`."""
    rows, columns, layer, packed = given.rows, given.columns, given.layer, given.packed
    of_rows = None if rows is None else rows.take(layer)
    of_columns = None if columns is None else columns.take(layer)
    arguments = [x, w, bias, *(packed or _NOTHING)[:4], *(of_rows or _NOTHING)[:4], *(of_columns or _NOTHING)[:4]]
    widths = [None if e is None else e.k for e in (packed, of_rows, of_columns)]
    shared = rows is not None, columns is not None
    how = given.recipe, needs, given.rank, *shared, *widths, router.generation()
    made: Any
    made, known = _forwards.repeated(arguments, *how)
    kind = known or repeat.Kind()
    if made is None:
        stands = [None if codes is None else _Shared(f) for codes, f in ((rows, of_rows), (columns, of_columns))]
        given = given._replace(rows=stands[0], columns=stands[1])
        run = partial(_flat_forward, multiply, x, w, bias, given, needs, stands, kind)
        made = run() if known is None else kind(run, arguments)
    note = kind.note
    at = 1 + note.saved
    for codes, left in zip((rows, columns), note.left, strict=True):
        if left is not None:
            codes.leave(Encoded(*made[at : at + 4], left[0]), layer, left[1])  # type: ignore[call-arg]
            at += 4
    return made[0], made[1 : 1 + note.saved], note.layout, None if known is None else note.backward


def _flat_forward(
    multiply: Callable[..., Any],
    x: Tensor,
    w: Tensor | None,
    bias: Tensor | None,
    given: Any,
    needs: Any,
    stands: Sequence[_Shared | None],
    kind: repeat.Kind,
) -> list[Tensor | None]:
    """Return y, the saved tensors, and the codes that are left; what else there is to know is the kind's note."""
    y, saved = multiply(x, w, bias, given, needs)
    tensors, layout = flat(saved)
    lefts = [None if s is None else s.left for s in stands]
    left = tuple([None if s is None else (s[0].k, s[1]) for s in lefts])
    if kind.note is None:
        kind.note = Note(layout, len(tensors), left, repeat.Repeats())
    return [y, *tensors, *(t for s in lefts if s is not None for t in s[0][:4])]


_NOTHING = (None,) * 4


def takes(x: Tensor, given: Any) -> bool:
    """Return whether a layer's call may be an ordinary one, which `forward` takes."""
    return (
        given.x_held is None
        and given.w_held is None
        and given.fixed is None
        and given.delayed is None
        and given.parts is None
        and x.numel() > 0
    )
