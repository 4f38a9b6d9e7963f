"""Adapters, such as peft's, on a model that is prepared, converted or quantised.

An adapter itself is never quantised. While the layers beneath adapters are prepared, the adapters are taken off, so
that every layer is chosen, and sees its siblings, as in a model without any; then they are put back and made adapters
of prepared layers. That is the business of the library's integration, which puts itself into `supports`, because
planning imports no such library.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from aoquant.planning.changes import Change

Taken = dict[int, list[Any]]  # by the id of a layer: the adapters on it, from the outermost


supports: list[Any] = []  # `integrations/peft/first.py`, once peft is imported


def is_adapter(module: Any) -> bool:
    """Return whether a module wraps a layer as peft's tuner layers do."""
    return isinstance(module, nn.Module) and hasattr(module, "base_layer") and hasattr(module, "merged")


@contextmanager
def taken_off(model: nn.Module, *, prepares: bool) -> Iterator[Taken]:
    """Let layers stand where adapters on them stand in `model`, until the block ends.

    prepares: whether each layer is to be prepared; other steps find the adapters in their places.
    """
    places: list[tuple[nn.Module, str, list[Any]]] = [
        (parent, name, [child])
        for parent in model.modules()
        if prepares and supports and not is_adapter(parent)
        for name, child in parent._modules.items()
        if is_adapter(child)
    ]
    for _, _, on in places:
        while is_adapter(on[-1].base_layer):
            on.append(on[-1].base_layer)
    try:
        for parent, name, on in places:
            parent._modules[name] = on[-1].base_layer
        yield {id(on[-1].base_layer): on for _, _, on in places}
    finally:
        for parent, name, on in places:
            parent._modules[name] = on[0]


def problems(model: nn.Module, changes: Iterable[Change], taken: Mapping[int, list[Any]]) -> list[str]:
    """Return why layers cannot be changed beneath their adapters, those `taken` off and those in their places."""
    found = []
    for c in changes:
        on = taken.get(id(c.module))
        why = adapter_problem(model, c.module, c.fqn, c.step) if on is None else supports[0].why_not(model, c, on)
        found += [f"{c.fqn}: {why}"] if why else []
    return found


def adopt(model: nn.Module, changes: Iterable[Change], taken: Mapping[int, list[Any]]) -> None:
    """Make the adapters on layers that are prepared now what they are when they are added to a prepared model."""
    adapted = {id(c.module): taken[id(c.module)] for c in changes if id(c.module) in taken}
    for support in supports if taken else ():
        support.adopt(model, adapted.values())


def plain_names(model: nn.Module, names: str) -> str:
    """A layer's names in `model`, joined by ", ", from before peft wrapped it: random numbers depend on them."""
    return ", ".join(_plain_name(model, name) for name in names.split(", "))


def _plain_name(model: Any, fqn: str) -> str:
    """Leave out what peft's model puts in front, and the copies of `modules_to_save`."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    module, plain, parts = model, list[str](), fqn.split(".") if fqn else []
    while parts:
        part = parts.pop(0)
        copied = hasattr(module, "original_module") and hasattr(module, "modules_to_save")
        module = getattr(module, part)  # the last part may name a stacked parameter
        if copied and part == "modules_to_save":
            module = module.get_submodule(parts.pop(0))
        elif not (copied and part == "original_module"):
            plain.append(part)
        if module is base:
            plain.clear()
    return ".".join(plain)


def adapter_problem(model: nn.Module, module: nn.Module, fqn: str, step: str) -> str | None:
    """Return why a layer under an adapter cannot be quantised now; None when it can.

    The adapter itself is never quantised; its base is before the adapter is put on, or once it is merged.
    """
    parts = fqn.partition(", ")[0].split(".")
    for i in range(len(parts)):
        parent = model.get_submodule(".".join(parts[:i]))
        if parent is module or not is_adapter(parent):
            continue
        if step != "convert":
            return "is part of an adapted layer: quantise or prepare the model first, and add adapters to it then"
        if not parent.merged:
            return "its adapter is not merged, and training computed the merged weight: call merge_and_unload() first"
    return None
