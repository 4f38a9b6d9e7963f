"""Repeat a function of tensors without its Python, where its calls are alike.

The second call of a kind is recorded (program.py), and later ones run the kernels alone. A layer's step is such a
function (linear/replay.py); so is an op that a compiled step calls through the dispatcher (define.py). The kernels and
their order are those of the function, and so are the bits.

Only on GPUs, where steps wait for the host. A call that is not ordinary runs the function: dispatch modes,
autocast, forced backends, a CUDA graph's capture. Recording waits for the device. So the first `MOST` kinds of calls
are remembered and no others: in batches of ever new lengths most calls run the function.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch._C import (
    _are_functorch_transforms_active,
    _is_any_autocast_enabled,
    _is_torch_function_mode_enabled,
    _len_torch_dispatch_stack,
)
from torch._dynamo import compiled_autograd
from torch.autograd import forward_ad

from . import native_step, router
from .program import Program, record, recording

FIRST_DEVICE = 0  # the least `get_device()` of a tensor whose calls are repeated; a CPU's is -1
MOST = 1024  # kinds of a function's calls that are remembered, whether they come again or not
NEW, ONCE, NEVER = "new", "once", "never"
PLAIN = (Tensor, torch.nn.Parameter)  # the types of tensors that ordinary calls have: no subclass


class Kind:
    """Hold what is known of calls that are alike.

    how, missing: all about its calls but their tensors. program: NEW, there was no call; ONCE, one; NEVER, it cannot be
        recorded. note: what the caller keeps beside it. left_to_library: whether the caller has told a library all.
    """

    __slots__ = ("how", "left_to_library", "missing", "note", "program")

    def __init__(self, how: Any = None, missing: int = 0) -> None:
        self.how, self.missing = how, missing
        self.program: Any = NEW
        self.note: Any = None
        self.left_to_library = False

    def __call__(
        self, function: Callable[[], Sequence[Tensor | None]], arguments: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        """Return `function()`, which it makes of `arguments` alone, and record it if this is the second call."""
        if self.program is ONCE:
            made, recorded = record(function, arguments)
            with _setting:
                if self.program is ONCE:  # another thread's program may be a library's by now
                    self.program = recorded or NEVER
            return made
        if self.program is NEW:
            self.program = ONCE
        return function()


class Repeats:
    """Hold the kinds of a function's calls.

    told: families that the caller has told a library all of, by their `how`.

    `how` says all about a call but its tensors, and can be hashed; the first argument is a tensor. Where csrc's library
    knows a kind, it finds it by itself.
    """

    def __init__(self) -> None:
        self.kinds: dict[Any, Kind] = {}
        self._families: dict[Any, Family] = {}
        self.told: dict[Any, Family] = {}

    def __call__(
        self, function: Callable[[], Sequence[Tensor | None]], arguments: Sequence[Tensor | None], *how: Any
    ) -> Sequence[Tensor | None]:
        """Return `function()`, which it makes of `arguments` and `how`."""
        made, kind = self.repeated(arguments, *how)
        if made is not None:
            return made
        return function() if kind is None else kind(function, arguments)

    def repeated(
        self, arguments: Sequence[Tensor | None], *how: Any
    ) -> tuple[Sequence[Tensor | None] | None, Kind | None]:
        """Return the results of a call, and its kind: results are None where the kind has no program, both where the
        call is not ordinary, or its kind is one too many.
        """
        ordinary = ordinary_call(arguments)
        if ordinary is None:
            return None, None
        there, missing = ordinary
        but_layouts = how, missing
        family = self._families.get(but_layouts)
        if family is not None:
            made, kind = family(there)
            if kind is not None:
                return made, kind
        kind = self._kind(there, but_layouts)
        if kind is None or not isinstance(kind.program, Program):
            return None, kind
        if kind.program.native is not None:
            if family is None:
                family = self._families.setdefault(but_layouts, Family())
            family.bind(kind, there)
        return kind.program(arguments), kind

    def family(self, kind: Kind) -> "Family | None":
        """Return the kinds that a library finds beside this one; None where it finds none of them."""
        return self._families.get((kind.how, kind.missing))

    @property
    def only_family(self) -> "Family | None":
        """Return the one family that there is; None where there is none, or another."""
        return next(iter(self._families.values())) if len(self._families) == 1 else None

    def _kind(self, there: Sequence[Tensor], but_layouts: Any) -> Kind | None:
        """Return the kind of a call; None where programs may not read its tensors, or for one too many."""
        low, layouts, one, device = 0, list[Any](), set[int](), there[0].get_device()
        for t in there:
            if t.get_device() != device:
                return None
            layouts.append((t.shape, t.stride(), t.dtype))
            low |= t.data_ptr()
            one.add(id(t))
        if len(one) < len(there) or low % 16:  # a program would take two arguments that are one tensor for one
            return None
        key = but_layouts, device, *layouts
        found = self.kinds.get(key)
        if found is None and len(self.kinds) < MOST:
            found = self.kinds.setdefault(key, Kind(*but_layouts))
        return found


class Family:
    """Hold kinds that a library knows, and that differ in the layouts of their tensors alone."""

    def __init__(self) -> None:
        self.number, self._kinds = next(_numbers), dict[int, Kind]()
        self.run, self._bind = native_step.operator("family_run"), native_step.operator("family_bind")
        weakref.finalize(self, native_step.operator("family_forget"), self.number)

    def __call__(self, tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor | None] | None, Kind | None]:
        """Return the results of a call, and its kind; None for both where the library has no program, or it fails."""
        try:
            made, number = self.run(self.number, tensors)
        except Exception:  # the call's own error comes from its steps, one by one
            return None, None
        kind = self._kinds.get(number)
        return (None, None) if kind is None else (kind.program.whole(made), kind)

    def bind(self, kind: Kind, tensors: Sequence[Tensor]) -> None:
        """Let calls like this one run the kind's program from now on."""
        number = kind.program.native
        if number not in self._kinds:
            self._kinds[number] = kind
            self._bind(self.number, number, tensors)


_numbers = count(1)
_setting = threading.Lock()


def ordinary_call(arguments: Sequence[Tensor | None]) -> tuple[list[Tensor], int] | None:
    """Return (the arguments that are there, of which the first is, a bit for each that is not); None for a call that is
    not ordinary.
    """
    first: Any = arguments[0]
    if first.get_device() < FIRST_DEVICE or unusual(first):
        return None
    there, missing = list[Tensor](), 0
    for i, t in enumerate(arguments):
        if t is None:
            missing += 1 << i
        elif type(t) in PLAIN and not t.is_neg():
            there.append(t)
        else:  # hooks of saved tensors may change anything
            return None
    return there, missing


def unusual(t: Tensor) -> bool:
    """Return whether something watches the operators, changes them, chooses the kernels, or captures them."""
    return bool(
        watched()
        or _is_any_autocast_enabled()  # ops run outside of it, and their operators would not
        or _are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or (t.is_cuda and (torch.cuda.is_current_stream_capturing() or t.get_device() != torch._C._cuda_getDevice()))
    )


def watched() -> bool:
    """Return whether something chooses the kernels, or watches the operators, as tracers do: it would see the library's
    one in place of those that a program runs.
    """
    return bool(
        _len_torch_dispatch_stack()
        or _is_torch_function_mode_enabled()
        or router.forcing()  # by a context that the library does not know, where tasks and threads copied it
        or recording()  # whose mode is no mode to what it calls
        or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        or compiled_autograd.compiled_autograd_enabled
    )
