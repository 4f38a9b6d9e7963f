"""Repeat a function of tensors without its Python, where its calls are alike.

The second call of a kind is recorded (program.py), and later ones run the kernels alone. A layer's step is such a
function (linear/replay.py); so is an op that a compiled step calls through the dispatcher (define.py). The kernels and
their order are those of the function, and so are the bits.

Only on GPUs, where steps wait for the host. A call that is not ordinary runs the function: dispatch modes,
autocast, forced backends, a CUDA graph's capture. Recording waits for the device. So the first `MOST` kinds of calls
are recorded and no others: in batches of ever new lengths most calls run the function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import (
    _are_functorch_transforms_active,
    _is_any_autocast_enabled,
    _is_torch_function_mode_enabled,
    _len_torch_dispatch_stack,
)

from . import router
from .program import Program, record

FIRST_DEVICE = 0  # the least `get_device()` of a tensor whose calls are repeated; a CPU's is -1
MOST = 1024
NEW, ONCE, NEVER = "new", "once", "never"
PLAIN = (Tensor, torch.nn.Parameter)


class Kind:
    """Hold what is known of calls that are alike.

    program: NEW, there was no call; ONCE, one; NEVER, it cannot be recorded. note: what the caller keeps beside it.
    """

    __slots__ = ("note", "program")

    def __init__(self) -> None:
        self.program: Any = NEW
        self.note: Any = None

    def __call__(
        self, function: Callable[[], Sequence[Tensor | None]], arguments: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        """Return `function()`, which it makes of `arguments` alone."""
        if isinstance(self.program, Program):
            return self.program(arguments)
        if self.program is ONCE:
            made, recorded = record(function, arguments)
            self.program = recorded or NEVER
            return made
        if self.program is NEW:
            self.program = ONCE
        return function()


class Repeats:
    """Hold the kinds of a function's calls."""

    def __init__(self) -> None:
        self.kinds: dict[Any, Kind] = {}

    def __call__(
        self, function: Callable[[], Sequence[Tensor | None]], arguments: Sequence[Tensor | None], *how: Any
    ) -> Sequence[Tensor | None]:
        """Return `function()`, which it makes of `arguments` and `how`."""
        kind = self.kind(arguments, *how)
        return function() if kind is None else kind(function, arguments)

    def kind(self, arguments: Sequence[Tensor | None], *how: Any) -> Kind | None:
        """Return the kind of a call; None where it is not ordinary, or one too many.

        arguments: the first one is a tensor. how: can be hashed.
        """
        first: Any = arguments[0]
        device = first.get_device()
        if device < FIRST_DEVICE or unusual(first):
            return None
        low, layouts, one = 0, list[Any](), set[int]()
        for t in arguments:
            if t is None:
                layouts.append(None)
            elif type(t) not in PLAIN or t.get_device() != device:  # hooks of saved tensors may change anything
                return None
            else:
                layouts.append((t.shape, t.stride(), t.dtype))
                low |= t.data_ptr()
                one.add(id(t))
        twice = len(one) + layouts.count(None) < len(arguments)  # a program would take them for one
        if twice or low % 16:
            return None
        key = (how, device, *layouts)
        found = self.kinds.get(key)
        if found is None and len(self.kinds) < MOST:
            found = self.kinds.setdefault(key, Kind())
        return found


def unusual(t: Tensor) -> bool:
    """Return whether something watches the operators (as tracers do), chooses the kernels, or captures them."""
    return bool(
        _len_torch_dispatch_stack()
        or _is_any_autocast_enabled()  # ops run outside of it, and their operators would not
        or _is_torch_function_mode_enabled()
        or router.forcing()
        or _are_functorch_transforms_active()
        or (t.is_cuda and (torch.cuda.is_current_stream_capturing() or t.get_device() != torch._C._cuda_getDevice()))
    )
