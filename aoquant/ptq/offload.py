"""A model that is larger than a GPU: its blocks are on the GPU one at a time, while they run.

A unit is an outermost child of a list of modules, such as a decoder layer, or any other module with tensors of its own.
Copies of a unit's tensors take their place while it runs or is calibrated, and go when it is done. So float weights
never move, and weights that transformers has mapped from a file stay mapped.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from aoquant.report.measure import hooked


def is_list(module: nn.Module) -> bool:
    """Return whether the children of a module are blocks."""
    return isinstance(module, nn.ModuleList | nn.Sequential)


def elsewhere(t: Tensor, device: torch.device) -> bool:
    """Return whether a tensor is not on a device."""
    return t.device.type != device.type or device.index not in (None, t.device.index)


def aside(x: Tensor) -> Tensor:
    """Return a copy of a block's input in host memory, pinned where it comes from a GPU."""
    return torch.empty_like(x, device="cpu", pin_memory=x.is_cuda).copy_(x)


def brought(x: Tensor, device: torch.device) -> Tensor:
    """Return a block's input on a device."""
    return x.to(device)


def passed(*args: Any, **kwargs: Any) -> Any:
    """Return the first tensor: the forward of a block that is not run, whose tensors stay where they are."""
    return next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)


@contextmanager
def on_device(module: nn.Module, device: torch.device | None) -> Iterator[None]:
    """Have the tensors of a module on a device inside. None: leave them where they are.

    What takes the place of a tensor inside, such as a packed weight, is moved to where that tensor was.
    """
    leave = _enter(module, device)
    try:
        yield
    finally:
        leave()


@contextmanager
def streamed(model: nn.Module, device: torch.device | None) -> Iterator[None]:
    """Let each unit of a model be on a device while it runs, inside. None: leave them where they are."""
    present = dict[nn.Module, Callable[[], None]]()

    def before(unit: nn.Module, _: Any) -> None:
        if unit not in present and vars(unit).get("forward") is not passed:
            present[unit] = _enter(unit, device)

    def after(unit: nn.Module, *_: Any) -> None:
        present.pop(unit, _nothing)()

    units = [] if device is None else [*_units(model)]
    entering = hooked(unit.register_forward_pre_hook(before, prepend=True) for unit in units)
    try:
        with entering, hooked(unit.register_forward_hook(after, always_call=True) for unit in units):
            yield
    finally:
        for leave in present.values():
            leave()


def _nothing() -> None:
    pass


def _units(module: nn.Module) -> Iterator[nn.Module]:
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    for child in module.children() if not own else ():
        yield from [child] if is_list(module) else _units(child)
    if own:
        yield module


def _enter(module: nn.Module, device: torch.device | None) -> Callable[[], None]:
    """Put copies on a device in the place of a module's tensors; return what undoes it."""
    moved: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}
    copies: dict[int, Tensor] = {}  # tensors that modules share stay shared
    for _, held, name, t in _tensors(module):
        if device is not None and elsewhere(t, device):
            if id(t) not in copies:
                copies[id(t)] = _copied(t, device)
            held[name] = copies[id(t)]
            moved[id(held), name] = t, held[name]
    if not moved:
        return _nothing
    home = next(before.device for before, _ in moved.values())

    def leave() -> None:
        for owner, held, name, now in _tensors(module):
            before, copy = moved.get((id(held), name), (None, None))
            if before is not None and now is copy:
                if not isinstance(before, nn.Parameter):
                    before.copy_(now)  # calibration writes to buffers
                held[name] = before
            elif elsewhere(now, home):
                setattr(owner, name, _copied(now, home))  # a packed layer drops its views of the copy

    return leave


def _tensors(module: nn.Module) -> list[tuple[nn.Module, dict[str, Any], str, Tensor]]:
    """Return (owner, its dictionary, name, tensor) of a module's parameters and buffers."""
    held: list[tuple[nn.Module, dict[str, Any]]] = [
        (m, d) for m in module.modules() for d in (m._parameters, m._buffers)
    ]
    return [(m, d, name, t) for m, d in held for name, t in d.items() if t is not None]


def _copied(t: Tensor, device: torch.device) -> Tensor:
    copy = t.detach().to(device, copy=True)
    return nn.Parameter(copy, requires_grad=t.requires_grad) if isinstance(t, nn.Parameter) else copy
