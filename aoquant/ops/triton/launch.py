"""Launching a kernel for the second time.

`fn[grid](...)` binds arguments to parameters, reads the type and the alignment of each, writes all that down as a
string and looks up the compiled kernel under it: twenty microseconds of Python before anything is launched, eight times
in a training step of one layer. Between two steps none of it changes but the tensors' addresses. So a `Launch` has its
grid and its numbers fixed, lets Triton do all of the above once for each device, dtypes and alignment, and after that
hands addresses to the compiled kernel that Triton returned: to its launcher, as `kernel[grid](*arguments)` does, less
what that prepares for a profiler's hooks. Where there are such hooks, they are served; launches by csrc's library, of
which `Kernel` tells it, have none.

Where there is no such kernel (Triton's interpreter) or it wants to be called differently (a Triton that we do not
know), every call takes the long way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from .. import native_program, program
from ..native_program import Kernel, Parameter, bits

LAUNCHES = 4096  # launches that a kernel's module remembers: one for each format, shape and use


def on(t: Tensor) -> AbstractContextManager[Any]:
    """A context in which `fn[grid](...)`, which launches on the current device, launches on t's."""
    device = t.get_device()
    return torch.cuda.device(device) if device >= 0 and device != torch.cuda.current_device() else nullcontext()


@cache
def multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors a GPU has; 4 for a CPU, where Triton's interpreter runs."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


_checked: dict[tuple[Any, ...], dict[str, Any]] = {}


def described(t: Tensor, *block: int) -> TensorDescriptor:
    """Of a tensor with contiguous rows that is read or written in blocks of these sizes, one for each dimension. What
    its constructor checks is checked once for a shape and its strides.
    """
    key = t.shape, t.stride(), t.dtype, block
    fields = _checked.get(key)
    if fields is None or t.data_ptr() % 16:
        descriptor = TensorDescriptor(t, list(t.shape), list(t.stride()), list(block))
        if len(_checked) < LAUNCHES:
            _checked[key] = {**vars(descriptor), "base": None}
        return descriptor
    descriptor = TensorDescriptor.__new__(TensorDescriptor)
    vars(descriptor).update(fields, base=t)
    return descriptor


class Launch:
    """`fn[grid](*tensors, **constants)`, for tensors of any dtype and device.

    fn: a Triton kernel whose first parameters are tensors, or descriptors of tensors with the same blocks in every
        call. constants: its other parameters, numbers and constexprs, all of them; then launch options, such as
        num_warps.
    """

    def __init__(self, fn: Any, grid: Sequence[int], **constants: Any) -> None:
        self._fn, self._constants = fn, constants
        self._grid = (*grid, *(1,) * (3 - len(grid)))
        self._rest = [constants[name] for name in fn.arg_names if name in constants]
        self._ready: dict[tuple[Any, ...], _Ready | None] = {}  # None: the long way

    def __call__(self, *tensors: Tensor | TensorDescriptor | int | None) -> None:
        """Launch on the tensors' device, in its current stream. None: a kernel without this tensor. int: a number that
        may be another in every call, of a parameter that the kernel does not specialise.
        """
        addresses: list[Any] = list(tensors)
        key: list[Any] = list(tensors)  # None stays None
        low, some = 0, None
        for i, t in enumerate(tensors):
            if isinstance(t, Tensor):
                some = t
                addresses[i] = address = t.data_ptr()
                low |= address
            elif t is None:
                continue
            elif isinstance(t, int):
                key[i] = int
                continue
            else:
                some = t.base
            key[i] = some.dtype
        assert some is not None
        device = some.get_device()
        if device >= 0 and device != torch._C._cuda_getDevice():  # a layer that a device map placed on another GPU
            with torch.cuda.device(device):
                return self(*tensors)
        key.append(device)
        if low % 16:  # Triton compiles another kernel for a tensor that does not start at a multiple of 16
            key += [type(a) is int and k is not int and a % 16 != 0 for a, k in zip(addresses, key, strict=False)]
        kind = tuple(key)
        again = self._ready.get(kind)
        if program.recorders and (recorder := program.recorders.get(get_ident())) is not None:
            recorder.launched(*self._repeat(again, tensors))
        if again is not None:
            try:
                return again.run(addresses)
            except (AttributeError, TypeError):  # not the arguments that this Triton's launcher takes
                self._ready[kind] = None
        kernel = self._fn[self._grid](*tensors, **self._constants)
        if kind not in self._ready:
            self._ready[kind] = _again(kernel, self._grid, self._rest)

    def _repeat(
        self, again: _Ready | None, arguments: Sequence[Any]
    ) -> tuple[Callable[..., None], list[Tensor], bool, Kernel | None]:
        """Return (this launch as a function of its tensors, the tensors, whether it reads their addresses alone, what
        csrc's library launches).
        """
        filled = [a.base if isinstance(a, TensorDescriptor) else a for a in arguments]
        places = [i for i, given in enumerate(filled) if isinstance(given, Tensor)]
        fixed = [None if i in places else given for i, given in enumerate(arguments)]
        blocks = {i: a.block_shape for i, a in enumerate(arguments) if isinstance(a, TensorDescriptor)}

        def repeat(*tensors: Tensor) -> None:
            given = fixed.copy()
            for i, t in zip(places, tensors, strict=True):
                given[i] = described(t, *blocks[i]) if i in blocks else t if again is None else t.data_ptr()
            if again is None:
                self(*given)
            else:
                again.run(given)

        native = None if again is None else _native(again.kernel, self._grid, [*arguments, *self._rest])
        return repeat, [filled[i] for i in places], again is not None and not blocks, native


class _Ready(NamedTuple):
    """Hold a compiled kernel, and a function that launches it on addresses."""

    run: Callable[[Sequence[Any]], None]
    kernel: Any


def _native(kernel: Any, grid: Sequence[int], arguments: Sequence[Any]) -> Kernel | None:
    """Return what csrc's library launches; None for a kernel that takes more than addresses, numbers, descriptors."""
    try:
        meta, signature = kernel.metadata, kernel.src.signature
        plain = (meta.num_ctas, meta.launch_cooperative_grid, meta.launch_pdl) == (1, False, False)
        if not plain or meta.global_scratch_size or meta.profile_scratch_size or 0 in grid:
            return None
        threads, shared, address = meta.num_warps * meta.warp_size, meta.shared, kernel.function
        parameters, maps = list[Parameter](), iter(getattr(meta, "tensordesc_meta", None) or ())
        for kind, value in zip(signature.values(), arguments, strict=True):
            if kind.startswith("*"):
                parameters.append(None)
            elif kind in ("i1", "i8", "i16", "i32", "i64"):
                parameters.append(int(value))
            elif kind == "fp32":
                parameters.append(bits(value))
            elif kind.startswith("tensordesc<"):
                parameters += native_program.described(next(maps, {}), value.shape, value.strides, value.padding)
            elif kind != "constexpr":
                return None
    # a Triton that we do not know, or a number beyond float32
    except (AttributeError, TypeError, ValueError, OverflowError):
        return None
    return Kernel(address, grid, threads, shared, parameters)


def _again(kernel: Any, grid: Sequence[int], rest: Sequence[Any]) -> _Ready | None:
    """Return what launches `kernel[grid](*addresses, *rest)` on the device that is current now; None if the kernel is
    none that we know.
    """
    try:
        launch: Any = kernel.run
        constant: tuple[Any, ...] = kernel.function, kernel.packed_metadata, None, None, None
    except AttributeError:
        return None
    device, stream = driver.active.get_current_device(), driver.active.get_current_stream
    if not getattr(launch, "global_scratch_size", 1) and not getattr(launch, "profile_scratch_size", 1):
        # past the launcher's look for scratch memory, of which it needs none
        how = launch.launch_cooperative_grid, launch.launch_pdl, None, None
        launch, constant = launch.launch, (constant[0], *how, *constant[1:])

    def run(addresses: Sequence[Any]) -> None:
        if knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls:
            kernel[grid](*addresses, *rest)
        else:
            launch(*grid, stream(device), *constant, *addresses, *rest)

    return _Ready(run, kernel)


@contextmanager
def counted() -> Iterator[list[int]]:
    """Count the launches of this thread inside the block, of any Triton kernel: yield a list of one number."""
    thread, count = get_ident(), [0]

    def seen(_: Any) -> None:
        count[0] += get_ident() == thread

    knobs.runtime.launch_enter_hook.add(seen)
    try:
        yield count
    finally:
        knobs.runtime.launch_enter_hook.remove(seen)


program.count_launches.append(counted)
