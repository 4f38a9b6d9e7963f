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
from aoquant.ops.program import Program, record

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


class Forward(NamedTuple):
    """Hold a recorded forward.

    The program returns y, the saved tensors, and the codes that are left for other layers, of rows and of columns.
    left: (K, whether autograd keeps them) of both, None where there are none.
    """

    program: Program
    layout: Layout
    saved: int
    left: Left


class Step:
    """Hold what is known of calls that are alike: of a forward (as `Repeats` says it), and of its backwards."""

    def __init__(self) -> None:
        self.forward: Any = repeat.NEW
        self.backward = repeat.Repeats()

    def first(
        self, run: Callable[[], Any], arguments: Sequence[Tensor | None]
    ) -> tuple[Sequence[Any], Layout, int, Left]:
        """Run a forward that has no program yet. Return (the results of its program to be, the fields of `Forward`)."""
        if self.forward is not repeat.ONCE:
            if self.forward is repeat.NEW:  # another thread may have recorded it meanwhile
                self.forward = repeat.ONCE
            made, fields = run()
            return made, *fields
        found = list[Any]()

        def results() -> Sequence[Tensor | None]:
            made, fields = run()
            found[:] = fields
            return made

        made, program = record(results, arguments)
        self.forward = repeat.NEVER if program is None else Forward(program, *found)
        return made, *found


_steps: dict[Any, Step] = {}


def forward(
    multiply: Callable[..., Any], x: Tensor, w: Tensor | None, bias: Tensor | None, given: Any, needs: Any
) -> tuple[Tensor, Sequence[Tensor | None], Layout, Step | None]:
    """Return (y, the tensors that backward reads, their layout, what repeats the backward) of a call of `multiply`."""
    shared, layer, packed = (given.rows, given.columns), given.layer, given.packed
    found = [None if codes is None else codes.take(layer) for codes in shared]
    of_codes = tuple([-(codes is None) if f is None else f.k for codes, f in zip(shared, found, strict=True)])
    tensors = [x, w, bias, *(packed or _NOTHING)[:4]]
    of_tensors = tuple([None if t is None else (t.shape, t.stride(), t.dtype) for t in tensors])
    k = None if packed is None else packed.k
    key = given.recipe, needs, of_tensors, k, of_codes, given.rank, x.get_device(), router.generation()
    step = _steps.get(key)
    if step is None and len(_steps) < repeat.MOST:
        step = _steps.setdefault(key, Step())
    arguments = [*tensors, *(found[0] or _NOTHING)[:4], *(found[1] or _NOTHING)[:4]]
    made: Any
    if step is not None and isinstance(step.forward, Forward):
        program, layout, count, left = step.forward
        made = program(arguments)
    else:
        stands = [_Shared(f) for f in found]
        rows, columns = (None if codes is None else s for codes, s in zip(shared, stands, strict=True))
        run = partial(_flat_forward, multiply, x, w, bias, given._replace(rows=rows, columns=columns), needs, stands)
        if step is None:
            made, (layout, count, left) = run()
        else:
            made, layout, count, left = step.first(run, arguments)
    at = 1 + count
    for codes, how in zip(shared, left, strict=True):
        if how is not None:
            codes.leave(Encoded(*made[at : at + 4], how[0]), layer, how[1])  # type: ignore[call-arg]
            at += 4
    return made[0], made[1 : 1 + count], layout, step


def _flat_forward(
    multiply: Callable[..., Any],
    x: Tensor,
    w: Tensor | None,
    bias: Tensor | None,
    given: Any,
    needs: Any,
    stands: Sequence[_Shared],
) -> tuple[list[Tensor | None], tuple[Layout, int, Left]]:
    """Return (the results of a forward as a `Forward` has them, its other fields)."""
    y, saved = multiply(x, w, bias, given, needs)
    tensors, layout = flat(saved)
    left = tuple([None if s.left is None else (s.left[0].k, s.left[1]) for s in stands])
    codes = [t for s in stands if s.left is not None for t in s.left[0][:4]]
    return [y, *tensors, *codes], (layout, len(tensors), left)


_NOTHING = (None,) * 4


def takes(x: Tensor, w: Tensor | None, bias: Tensor | None, given: Any) -> bool:
    """Return whether a call is an ordinary one, which `forward` takes."""
    low, device = 0, x.get_device()
    if device < repeat.FIRST_DEVICE:
        return False
    for t in (x, w, bias) if given.packed is None else (x, bias, *given.packed[:4]):
        if t is not None:
            if type(t) not in repeat.PLAIN or t.get_device() != device:
                return False
            low |= t.data_ptr()
    return (
        low % 16 == 0
        and given.x_held is None
        and given.w_held is None
        and given.fixed is None
        and given.delayed is None
        and given.parts is None
        and x.numel() > 0
        and x is not w
        and not repeat.unusual(x)
    )
