"""Launching a kernel for the second time.

`fn[grid](...)` binds arguments to parameters, reads the type and the alignment of each, writes all that down as a string and looks up the
compiled kernel under it: twenty microseconds of Python before anything is launched, eight times in a training step of one layer. Between
two steps none of it changes but the tensors' addresses. So a `Launch` has its grid and its numbers fixed, lets Triton do all of the
above once for each device, dtypes and alignment, and after that hands addresses to the compiled kernel that Triton returned, by its
own `kernel[grid](*arguments)`, which knows how this version of Triton launches.

Where there is no such kernel (Triton's interpreter) or it wants to be called differently (a Triton that we do not know), every call takes
the long way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

PLANS = 4096  # launches that a kernel's module remembers: one for each format, shape and use


def on(t: Tensor) -> AbstractContextManager[Any]:
    """What to launch kernels in by `fn[grid](...)`, which takes the current device, when t may live on another."""
    device = t.get_device()
    return torch.cuda.device(device) if device >= 0 and device != torch.cuda.current_device() else nullcontext()


class Launch:
    """`fn[grid](*tensors, **constants)`, for tensors of any dtype and device.

    fn: a Triton kernel whose first parameters are tensors, or descriptors of tensors with the same blocks in every call. constants: its
    other parameters, numbers and constexprs, all of them; then launch options, such as num_warps.
    """

    def __init__(self, fn: Any, grid: Sequence[int], **constants: Any) -> None:
        self._fn, self._constants = fn, constants
        self._grid = (*grid, *(1,) * (3 - len(grid)))
        self._rest = [constants[name] for name in fn.arg_names if name in constants]
        self._ready: dict[tuple[Any, ...], Callable[..., Any] | None] = {}

    def __call__(self, *tensors: Tensor | TensorDescriptor | None) -> None:
        """Launch on the tensors' device, in its current stream. None: a kernel without this tensor."""
        addresses: list[Any] = []
        key: list[Any] = []
        device = -1
        for t in tensors:
            if t is None:
                addresses.append(None)
                key.append(None)
            elif isinstance(t, TensorDescriptor):
                addresses.append(t)
                key.append(t.base.dtype)
                device = t.base.get_device()
            else:
                address = t.data_ptr()
                addresses.append(address)
                key += t.dtype, address % 16 == 0  # what Triton compiles another kernel for
                device = t.get_device()
        key.append(device)
        if device >= 0 and device != torch.cuda.current_device():  # a layer that a device map placed on another GPU
            with torch.cuda.device(device):
                return self._launch(tuple(key), tensors, addresses)
        return self._launch(tuple(key), tensors, addresses)

    def _launch(self, key: tuple[Any, ...], tensors: Sequence[Any], addresses: Sequence[Any]) -> None:
        run = self._ready.get(key)
        if run is not None:
            try:
                run(*addresses, *self._rest)
                return
            except TypeError:  # not the arguments that this Triton's launcher takes
                self._ready[key] = None
        kernel = self._fn[self._grid](*tensors, **self._constants)
        if key not in self._ready:
            self._ready[key] = kernel[self._grid] if hasattr(type(kernel), "__getitem__") else None
