"""Repeat a call of a layer, and its backward, without their Python.

Nothing that the page (function.py) decides changes between two calls that are alike: recipe, shapes, strides, dtypes,
device, which gradients are asked for, and what is shared with other layers. So a call is recorded and repeated
(`ops.repeat`), forward and backward apart. Layers with equal calls share their programs.

Where csrc's step library is there (`ops.native_step`), it gets such a call whole (`step`): it finds the program, runs
it, and makes the node of autograd that runs the backward's. `learn` tells it of a kind that Python has repeated.

A call that is not ordinary takes the page: as there, and where the layer holds scales, transforms or codes beside its
weight, or where its weight is sharded.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aoquant.formats import Encoded
from aoquant.linear.cache import InputCodes
from aoquant.linear.saved import Layout, flat
from aoquant.ops import native_step, repeat, router

Left = tuple[tuple[int, bool] | None, ...]
Gradients = Callable[[Tensor, Sequence[Tensor | None], Tensor | None], Sequence[Tensor | None]]


class _Shared:
    """Stand for `InputCodes` in one forward: hold the codes that were found, and those that are left.

    codes: the `InputCodes` itself, where what is left goes there at once.
    """

    def __init__(self, found: Encoded | None, codes: InputCodes | None = None) -> None:
        self.found, self._codes = found, codes
        self.left: tuple[Encoded, bool] | None = None  # codes, and whether autograd keeps them
        self.find, self.layers = None if found is None else lambda: found, ()

    def take(self, layer: int) -> Encoded | None:
        """Return the codes that were found."""
        return self.found

    def leave(self, encoded: Encoded, layer: int, kept: bool) -> None:
        """Hold what is left, for the layer's own `InputCodes`."""
        self.left = encoded, kept
        if self._codes is not None:
            self._codes.leave(encoded, layer, kept)


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
# apart: servers have many numbers of rows, and would leave no kinds to training
_packed_products = repeat.Repeats()


class _Known(NamedTuple):
    """Hold what Python reads of a call that the step library ran.

    left: (K, whether autograd keeps them, which of its four tensors there are) of the codes of rows and of columns that
        are left for other layers; None where none are. The library finds what autograd keeps.
    saved: which tensors that backward reads there are. random: whether it draws. gradients: runs an unusual backward.
    """

    left: tuple[tuple[int, bool, list[bool]] | None, ...] | None
    saved: list[bool]
    random: bool
    gradients: Gradients


_known: dict[int, _Known] = {}  # by a number that the library holds
_numbers = count(1)


def product(x: Tensor, w: Tensor, bias: Tensor | None, recipe: str) -> Tensor | None:
    """Return y of a call that wants no gradient; None where no library knows it.

    recipe: as `function.Given`'s.
    """
    if not _plain(x, w, bias):
        return None
    return _product([x, w] if bias is None else [x, w, bias], _how(recipe, 0, _NO_NEEDS, bias), _forwards)


def packed_product(
    x: Tensor, packed: Encoded, bias: Tensor | None, recipe: str, page: Callable[[Tensor, Tensor | None], Tensor]
) -> Tensor | None:
    """Return `product` of an encoded weight, of which the library learns here; None where it cannot.

    x, bias: plain tensors. page: multiplies them by the weight, and reads no view of it that was made before.
    """
    arguments, how = [x, bias, *packed[:4]], _how(recipe, 0, _NO_NEEDS, bias, packed=packed)
    y = _product([t for t in arguments if t is not None], how, _packed_products)
    if y is not None:
        return y
    made, kind = _packed_products.repeated(arguments, *how)
    if kind is None or kind.program is repeat.NEVER:
        return None
    if made is None:
        made = kind(lambda: [page(x, bias)], arguments)
    family = _packed_products.family(kind)
    if family is not None:
        _packed_products.told[kind.how] = family
    return made[0]


def _product(given: list[Tensor], how: tuple[Any, ...], repeats: repeat.Repeats) -> Tensor | None:
    """Return y; None where no library knows the call. The library itself sees whether a CUDA graph is captured."""
    family = repeats.told.get(how)
    if family is None or repeat.watched():
        return None
    y: Tensor | None = native_step.operator("product")(family.number, given)
    return y


def step(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    needs: tuple[bool, bool, bool],
    random: Tensor | None,
    rows: InputCodes | None,
    columns: InputCodes | None,
    recipe: str,
    rank: int,
) -> tuple[Tensor | None, Any, Any]:
    """Return (y with its node; None where no library knows the call; then what stands for rows and columns, of which
    the shared codes are taken).

    needs: whether x, w and bias want their gradients. Others: as `function.Given`'s.
    """
    if True not in needs:
        return product(x, w, bias, recipe), rows, columns
    if repeat.watched():
        return None, rows, columns
    of_rows = None if rows is None else rows.take(id(w))
    of_columns = None if columns is None else columns.take(id(w))
    family = _forwards.told.get(_how(recipe, rank, needs, bias, rows, columns, of_rows, of_columns))
    if family is not None and _plain(x, w, bias):
        given = [x, w] if bias is None else [x, w, bias]
        for codes in (of_rows, of_columns):
            if codes is not None:
                given += [t for t in codes[:4] if t is not None]
        made, number, call = native_step.operator("forward")(family.number, given, bias, random)
        if number >= 0:
            left = _known[number].left
            if left is not None:
                _leave((rows, columns), left, call, iter(made[1:]), id(w))
            return made[0], rows, columns
    return None, rows and _Shared(of_rows, rows), columns and _Shared(of_columns, columns)


def _plain(x: Tensor, w: Tensor, bias: Tensor | None) -> bool:
    return type(x) in repeat.PLAIN and type(w) in repeat.PLAIN and (bias is None or type(bias) in repeat.PLAIN)


def _how(
    recipe: str,
    rank: int,
    needs: Any,
    bias: Tensor | None,
    rows: Any = None,
    columns: Any = None,
    of_rows: Encoded | None = None,
    of_columns: Encoded | None = None,
    packed: Encoded | None = None,
) -> tuple[Any, ...]:
    """Return all about a call but its tensors. of_rows, of_columns: the codes that another layer left."""
    if packed is None and True not in needs:  # nothing is shared, and nothing drawn
        return recipe, bias is None, router.generation()
    found = None if of_rows is None is of_columns else (_shape(of_rows), _shape(of_columns))
    alone = rows is None, columns is None
    return recipe, rank, *needs, bias is None, *alone, found, _shape(packed), router.generation()


def _shape(codes: Encoded | None) -> Any:
    return codes and (codes.k, *[t is None for t in codes[1:4]])


def _leave(shared: Any, lefts: Any, call: int, tensors: Iterator[Tensor], layer: int) -> None:
    """Leave the codes that a call made to other layers. tensors: of those that autograd does not keep."""
    first = 0
    for codes, left in zip(shared, lefts, strict=True):
        if left is not None:
            k, kept, parts = left
            if kept:
                codes.find, codes.k, codes.layers = partial(_found, call, first, parts), k, frozenset((layer,))
                first += sum(parts)
            else:
                four: list[Any] = [next(tensors) if there else None for there in parts]
                codes.leave(Encoded(*four, k), layer, False)  # type: ignore[call-arg]


def _found(call: int, first: int, parts: Sequence[bool]) -> list[Tensor | None] | None:
    """Return the tensors that a call shares, from the first on; None where one is gone."""
    shared = native_step.operator("shared")(call)
    tensors = iter(shared[first:])
    return [next(tensors) if there else None for there in parts] if shared else None


def learn(kind: repeat.Kind, random: bool, needs: Any, gradients: Any) -> None:
    """Let csrc's step library run such calls and their backwards from now on, once both are programs of it.

    random: whether backward draws. needs: whether x, w and bias want their gradients.
    gradients: the backward (`Gradients`), of the gradient, the saved tensors and the state of random numbers; None
        where there is none.
    """
    family, backward = _forwards.family(kind), kind.note.backward.only_family
    if kind.left_to_library or family is None:
        return
    if True in needs:
        if backward is None:
            return
        _implement()
        _tell(kind, random, needs, gradients, backward)
    _forwards.told[kind.how] = family
    kind.left_to_library = True


def _tell(kind: repeat.Kind, random: bool, needs: Any, gradients: Gradients, backward: repeat.Family) -> None:
    """Tell the step library of a kind whose backwards are `backward`'s."""
    note, program = kind.note, kind.program
    there = [True] * (1 + note.saved + 4 * sum(left is not None for left in note.left))
    if program.none is not None:
        there = [not none for none in program.none]
    saved, parts = there[1 : 1 + note.saved], iter(there[1 + note.saved :])
    lefts = tuple([None if left is None else (*left, [next(parts) for _ in range(4)]) for left in note.left])
    number, results, shared = next(_numbers), count(1 + sum(saved)), list[int]()
    for left in lefts:
        if left is not None:
            of_side = [next(results) for there in left[2] if there]
            shared += of_side if left[1] else ()
    _known[number] = _Known(lefts if any(lefts) else None, saved, random, gradients)
    asked = sum(1 << i for i, need in enumerate(needs) if need)
    native_step.operator("learn")(program.native, number, backward.number, sum(saved), shared, asked)


def _gradients(number: int, given: Sequence[Tensor]) -> list[Tensor]:
    """Run a backward that the step library does not: the gradients that are asked for."""
    known, tensors = _known[number], iter(given)
    grad = next(tensors)
    saved = [next(tensors) if there else None for there in known.saved]
    made = known.gradients(grad, saved, next(tensors) if known.random else None)
    return [t for t in made if t is not None]


def _implement() -> None:
    """Give the step library `_gradients`, the first time."""
    with _registering:
        if not _implementation:
            _implementation.append(torch.library.Library("aoquant_step", "IMPL"))
            _implementation[0].impl("gradients", _gradients, "CompositeImplicitAutograd")


_registering = threading.Lock()
_implementation: list[torch.library.Library] = []  # an operator goes with the `Library` that made it


def forward(
    multiply: Callable[..., Any], x: Tensor, w: Tensor | None, bias: Tensor | None, given: Any, needs: Any
) -> tuple[Tensor, Sequence[Tensor | None], Layout, repeat.Kind | None]:
    """Return (y, the tensors that backward reads, their layout, the kind if it is repeated) of a call of `multiply`."""
    rows, columns, layer, packed = given.rows, given.columns, given.layer, given.packed
    of_rows = None if rows is None else rows.take(layer)
    of_columns = None if columns is None else columns.take(layer)
    arguments = [x, w, bias, *(packed or _NOTHING)[:4], *(of_rows or _NOTHING)[:4], *(of_columns or _NOTHING)[:4]]
    how = _how(given.recipe, given.rank, needs[:3], bias, rows, columns, of_rows, of_columns, packed)
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
    if known is not None and w is not None and True not in needs:
        learn(known, False, needs[:3], None)
    return made[0], made[1 : 1 + note.saved], note.layout, known


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
_NO_NEEDS = (False,) * 3
