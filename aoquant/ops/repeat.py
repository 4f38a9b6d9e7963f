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


class Repeats:
    """Hold what is known of a function's calls, by their kind. NEW: there was none. ONCE: one. NEVER: it cannot be
    recorded.
    """

    def __init__(self) -> None:
        self.kinds: dict[Any, Any] = {}

    def __call__(
        self, function: Callable[[], Sequence[Tensor | None]], arguments: Sequence[Tensor | None], *how: Any
    ) -> Sequence[Tensor | None]:
        """Return `function()`, which it makes of `arguments` alone, and of `how`, which can be hashed; the first
        argument is a tensor.
        """
        first: Any = arguments[0]
        device = first.get_device()
        if device < FIRST_DEVICE or type(first) not in PLAIN or unusual(first):
            return function()
        low, layouts, one = 0, list[Any](), set[int]()
        for t in arguments:
            if t is None:
                layouts.append(None)
            elif type(t) not in PLAIN or t.get_device() != device:  # hooks of saved tensors may change anything
                return function()
            else:
                layouts.append((t.shape, t.stride(), t.dtype))
                low |= t.data_ptr()
                one.add(id(t))
        twice = len(one) + layouts.count(None) < len(arguments)  # a program would take them for one
        if twice or low % 16:
            return function()
        kind = (how, device, *layouts)
        program = self.kinds.get(kind, NEVER if len(self.kinds) >= MOST else NEW)
        if isinstance(program, Program):
            return program(arguments)
        if program is NEVER:
            return function()
        if program is NEW:
            self.kinds[kind] = ONCE
            return function()
        made, recorded = record(function, arguments)
        self.kinds[kind] = recorded or NEVER
        return made


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
