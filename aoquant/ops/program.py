"""Record the kernels that a function runs, and run them again without its Python: by csrc's step library, in one call,
where it has words for all of them (native_program.py), or one after the other.

`record` runs a function once under a dispatch mode and writes down every operator and every Triton launch with the
tensors that it reads and makes. A `Program` repeats them on other tensors. It holds for tensors of the same shapes,
strides, dtypes, device and alignment, and for a function whose Python decides by nothing else; the caller's key says so
(linear/replay.py).

A program is returned only where it is known to be whole: no operator read a value back from the device, no argument
was written, no launch went past `Launch`, and a first run gives the bits of the function's own results.
(`Tensor.tolist` and `Tensor.numpy` use no operator: a function that is recorded calls neither.)
"""

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from operator import itemgetter
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from . import native_program as native
from . import native_step
from .native_program import native_program

_log = logging.getLogger("aoquant.program")
_aten = torch.ops.aten
_EMPTY = (
    _aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default, _aten.new_empty.default,
    _aten.new_empty_strided.default,
)  # fmt: skip

_HERE = object()
LARGE = 1 << 16  # bytes of a result that is let go behind its last reader, and not at the end
ROOM = 1 << 29  # bytes that a recording may hold: a function that makes more keeps the device busy for long

# The recorder of each thread that records. Other threads run as usual meanwhile.
recorders: "dict[int, Recorder]" = {}
# Counts the launches of any Triton kernel inside a block; triton/launch.py puts it here when it is imported.
count_launches: list[Callable[[], AbstractContextManager[list[int]]]] = []


def recording() -> bool:
    """Return whether this thread records."""
    return get_ident() in recorders


class Step(NamedTuple):
    """Hold one step of a program.

    function: of the tensors in `places`; its result goes into the slot `result`, if that is not negative. None: empty
        these slots.
    words: the same for csrc's library, no words where an earlier step has done it, and None where it cannot.
    """

    function: Any
    places: list[int]
    result: int
    words: list[Any] | None = None


class Program:
    """Repeat the steps of a function on tensors, of which some may be None; those were None when it was recorded.

    native: its number in csrc's step library; None where Python runs it. none: which of its results are None; None
        where none is.
    """

    __slots__ = ("__weakref__", "_results", "_slots", "_steps", "native", "none")

    def __init__(self, steps: list[Step], slots: list[Any], results: list[int], count: int) -> None:
        self._steps, self._slots, self._results = steps, slots[count:], results
        self.none = [place < 0 for place in results] if -1 in results else None
        given = [slot for slot, t in enumerate(slots[:count]) if t is not None]
        constants = {slot: t for slot, t in enumerate(slots) if t is not None and slot >= count}
        words = [step.words for step in steps if step.words != []]
        made = [place for place in results if place >= 0]
        self.native = native_program(words, constants, given, made, len(slots))
        if self.native is not None:
            weakref.finalize(self, native_step.operator("program_forget"), self.native)

    def __call__(self, arguments: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Return the function's results on these arguments."""
        if self.native is not None:
            try:
                return self.in_library(arguments)
            except Exception as error:  # for memory, say: the next call may have it
                _log.debug("csrc's library failed: %s", error)
        return self._one_by_one(arguments)  # the same step raises here, with its own error

    def in_library(self, arguments: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Return the results that csrc's library makes."""
        given = [t for t in arguments if t is not None]
        return self.whole(native_step.operator("program_run")(self.native, given))

    def first(self, arguments: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Return the results of a first run. Python runs the program from now on if csrc's library cannot."""
        if self.native is not None:
            try:
                return self.in_library(arguments)
            except Exception as error:
                _log.debug("csrc's library runs no such program: %s", error)
                self.native = None
        return self._one_by_one(arguments)

    def whole(self, made: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Return the results, of which a library makes those that are not None."""
        if self.none is None:
            return made
        there = iter(made)
        return [None if none else next(there) for none in self.none]

    def _one_by_one(self, arguments: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Run the steps in Python."""
        at = [*arguments, *self._slots]
        for function, places, result, _ in self._steps:
            if function is None:
                for place in places:
                    at[place] = None
            elif result < 0:
                function(*[at[place] for place in places])
            else:
                at[result] = function(*[at[place] for place in places])
        return [None if place < 0 else at[place] for place in self._results]


def record(
    function: Callable[[], Sequence[Tensor | None]], arguments: Sequence[Tensor | None]
) -> tuple[Sequence[Tensor | None], Program | None]:
    """Return (what `function()` returns, a program that makes it of `arguments`, or None where that is not certain).

    function: reads no other tensors than `arguments` and constants. It runs again, as usual, where memory ends.
    """
    recorder, results = Recorder(arguments), None
    thread = get_ident()
    with _counted() as launches:
        recorders[thread] = recorder
        try:
            with recorder:
                results = function()
        except torch.OutOfMemoryError:  # a recorder holds all that is made; without one there may be room
            del recorder
        finally:
            del recorders[thread]
    if results is None:
        return function(), None
    if launches and launches[0] != recorder.launches:
        recorder.refuse(f"{launches[0] - recorder.launches} Triton launches were not seen")
    program = recorder.program(results)
    if program is not None and not _equal(program, arguments, results):
        recorder.refuse("its first run had other results")
        program = None
    if program is None:
        _log.debug("not recorded: %s", recorder.refused)
    return results, program


@contextmanager
def _counted() -> Iterator[list[int]]:
    if not count_launches:
        yield []
        return
    with count_launches[0]() as launches:
        yield launches


def _equal(program: Program, arguments: Sequence[Tensor | None], results: Sequence[Tensor | None]) -> bool:
    """Return whether the program's results have the layouts and the bytes of `results`."""
    try:
        for made, wanted in zip(program.first(arguments), results, strict=True):
            if made is wanted:
                continue
            if made is None or wanted is None or made.dtype is not wanted.dtype or made.shape != wanted.shape:
                return False
            if made.stride() != wanted.stride() or not torch.equal(_bytes(made), _bytes(wanted)):
                return False
    except Exception as error:  # memory for twice the results, say: the function itself could run
        _log.debug("its first run failed: %s", error)
        return False
    return True


def _bytes(t: Tensor) -> Tensor:
    return t.contiguous().reshape(-1).view(torch.uint8)


class Recorder(TorchDispatchMode):
    """Write down what runs inside of it."""

    def __init__(self, arguments: Sequence[Tensor | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches, self.refused = 0, ""
        self._count = len(arguments)
        self._tensors: list[Tensor | None] = list(arguments)  # of each slot; held, so that an id is one tensor's
        self._slots: dict[int, int] = {}
        for slot, t in enumerate(arguments):
            if t is not None and self._slots.setdefault(id(t), slot) != slot:
                self.refuse("two arguments are one tensor, and may be two later")
        self._storages = {t.untyped_storage()._cdata for t in arguments if t is not None}
        self._foreign: set[int] = set()  # storages of other tensors that were there before
        self._same: dict[int, int] = {}  # a view -> the slot whose first byte is its first byte
        self._steps: list[Step] = []
        self._held: list[Tensor] = []  # so that an id is one tensor's
        self._device = next((t.device for t in arguments if t is not None), torch.device("cpu"))
        self._made: set[int] = set()
        self._own: set[int] = set()  # storages of what was made
        self._large: set[int] = set()
        self._bytes = 0  # of what was made

    def refuse(self, reason: str) -> None:
        """Make no program, because of `reason`, and let go of all that was made."""
        self.refused = self.refused or reason
        self._tensors, self._steps, self._held = [], [], []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if not self.refused:
            self._operator(func, args, kwargs, made)
        return made

    def launched(
        self, repeat: Callable[..., None], tensors: Sequence[Tensor], addresses: bool, kernel: native.Kernel | None
    ) -> None:
        """Write down a launch, which `repeat(*tensors)` repeats, and `kernel` for csrc's library.

        addresses: `repeat` reads nothing else of the tensors. It makes descriptors of their shapes and strides, too;
            then both it and the library, whose words hold these, read the addresses of the very views.
        """
        self.launches += 1
        if self.refused:
            return
        slots = [self._slot(t) for t in tensors]
        if addresses:
            slots = [self._same.get(slot, slot) for slot in slots]
        self._steps.append(Step(repeat, slots, -1, None if kernel is None else native.launch(kernel, slots)))

    def program(self, results: Sequence[Tensor | None]) -> Program | None:
        """Return what was written down, for these results; None where it was refused."""
        found = [-1 if t is None else self._slots.get(id(t), -2) for t in results]
        if -2 in found:
            self.refuse("a result is no tensor that was seen")
        if self.refused:
            return None
        # backwards: without steps that nothing reads, and large results are let go behind their last reader
        needed, steps = set(found), list[Step]()
        for step in reversed(self._steps):
            if step.result >= 0 and step.result not in needed:
                continue
            last = [place for place in {*step.places, step.result} if place in self._large and place not in needed]
            if last:
                steps.append(Step(None, last, -1, native.drop(last)))
            needed.update(step.places)
            steps.append(step)
        slots = [None if slot in self._made else t for slot, t in enumerate(self._tensors)]
        return Program(steps[::-1], slots, found, self._count)

    def _slot(self, t: Tensor) -> int:
        slot = self._slots.get(id(t))
        if slot is None:
            if t.untyped_storage()._cdata in self._storages:
                self.refuse("it reads a view of an argument that was made before")
            self._foreign.add(t.untyped_storage()._cdata)
            slot = self._new(t)
        return slot

    def _new(self, t: Tensor) -> int:
        slot = self._slots[id(t)] = len(self._tensors)
        self._tensors.append(t)
        return slot

    def _operator(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], made: Any) -> None:
        schema = func._schema
        given = _tensors((*args, *kwargs.values()))
        by_numbers = func is _aten.index.Tensor and not any(t.dtype in (torch.bool, torch.uint8) for t in given[1:])
        if torch.Tag.dynamic_output_shape in func.tags and not by_numbers:
            self.refuse(f"{func} makes as many values as there are")
        if schema.is_mutable:
            named = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
            written = [
                named.get(a.name) for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write
            ]
            if any(t.untyped_storage()._cdata not in self._own for t in _tensors(written)):
                self.refuse(f"{func} writes a tensor that was there before")
        if func is _aten.as_strided.default and args[0].untyped_storage()._cdata in self._storages:
            self.refuse(f"{func} counts from the beginning of an argument's storage")
        several = isinstance(made, (tuple, list))
        if schema.is_mutable and made is not None and (several or id(made) not in self._slots):
            self.refuse(f"{func} writes a tensor and makes another")
        if made is not None and not all(isinstance(t, Tensor) for t in (made if several else (made,))):
            if not given:  # of dtypes and sizes, which stay the same
                return
            self.refuse(f"{func} reads a value back")
        if self.refused:
            return
        first: Any = given[0] if given else None
        shares = isinstance(made, Tensor) and first is not None and _shares(made, first)
        owned = shares and made.untyped_storage()._cdata in self._own
        if owned and func is _aten.detach.default:  # the same, where there is no autograd
            self._slots[id(made)] = self._slots[id(first)]
            self._held.append(made)
            return
        if func in _EMPTY:
            how = {"dtype": made.dtype, "device": made.device}
            function: Any = partial(torch.empty_strided, made.shape, made.stride(), **how)
            self._result(function, [], made, native.make(made, self._device, len(self._tensors)))
            return
        function, places = self._call(func, args, kwargs)
        by_name = native.named(func, args, kwargs)
        for t in _tensors(by_name.values()):  # constants have slots before results have
            self._slot(t)
        words = partial(native.operator, func, by_name, self._slot)
        if made is None or (not several and id(made) in self._slots):  # written in place
            self._steps.append(Step(function, places, -1, words([] if made is None else [self._slots[id(made)]])))
            return
        if several:
            of_all = len(self._tensors)
            self._tensors.append(None)
            self._made.add(of_all)
            self._large.add(of_all)
            slots = [of_all + 1 + i for i in range(len(made))]
            self._steps.append(Step(function, places, of_all, words(slots)))
            for i, t in enumerate(made):
                self._result(itemgetter(i), [of_all], t, [])
            return
        slot = len(self._tensors)
        view = native.view(made, first, self._slots[id(first)], slot) if shares else None
        self._result(function, places, made, words([slot]) if view is None else view)
        if shares and made.data_ptr() == first.data_ptr():
            before = self._slots[id(first)]
            self._same[slot] = self._same.get(before, before)

    def _result(self, function: Any, places: list[int], made: Tensor, words: list[Any] | None) -> None:
        if self.refused:
            return
        slot = self._new(made)
        self._made.add(slot)
        storage = made.untyped_storage()
        if storage._cdata not in self._storages | self._foreign | self._own:
            self._own.add(storage._cdata)
            self._bytes += storage.nbytes()
        if storage.nbytes() >= LARGE:
            self._large.add(slot)
        self._steps.append(Step(function, places, slot, words))
        if self._bytes > ROOM:
            self.refuse(f"it makes more than {ROOM} bytes")

    def _call(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, list[int]]:
        """Return (a function of the tensors among an operator's arguments, their slots)."""
        first = next(i for i, a in enumerate((*args, None)) if not isinstance(a, Tensor))
        rest = dict(zip((a.name for a in func._schema.arguments[first:]), args[first:], strict=False)) | kwargs
        slots = [self._slot(t) for t in args[:first]]
        holds = {name: tensors for name, value in rest.items() if (tensors := _tensors((value,)))}
        if not holds:
            return partial(func, **rest) if rest else func, slots
        slots += [self._slot(t) for tensors in holds.values() for t in tensors]
        # a program holds none of the tensors that it was recorded with
        rest |= {name: tree_map_only(Tensor, lambda _: _HERE, rest[name]) for name in holds}
        return partial(_filled, func, first, rest, list(holds)), slots


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among values, and in lists among them."""
    found = list[Tensor]()
    for value in values:
        found += [t for t in (value if isinstance(value, (list, tuple)) else (value,)) if isinstance(t, Tensor)]
    return found


def _filled(op: Any, first: int, rest: dict[str, Any], names: Sequence[str], *tensors: Tensor) -> Any:
    """Call an operator that has tensors behind other arguments, or in lists. names: of arguments with tensors, where
    _HERE stands for each.
    """
    behind, given = iter(tensors[first:]), rest.copy()
    for name in names:
        value = rest[name]
        given[name] = next(behind) if value is _HERE else [next(behind) if t is _HERE else t for t in value]
    return op(*tensors[:first], **given)


def _shares(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata
