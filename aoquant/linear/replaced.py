"""Prepared modules that are not there any more: a resized head, a replaced block.

Every module above a prepared one remembers the names of those children that hold prepared modules. Such a record goes
along when the model is wrapped, copied or pickled, and a part of a model has its own.
"""

from collections.abc import Iterator

from torch import nn

from aoquant.linear.kinds import is_packed
from aoquant.linear.prepared import PreparedModule

_RECORD = "aoquant_prepared"  # attribute of a module: names of children that hold prepared modules


def record(model: nn.Module) -> None:
    """Remember where prepared modules are, beside what is remembered already."""
    for fqn, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, PreparedModule):
            while fqn:
                fqn, _, name = fqn.rpartition(".")
                vars(model.get_submodule(fqn)).setdefault(_RECORD, set()).add(name)


def forget(model: nn.Module) -> None:
    """Remember nothing of what was prepared in `model`."""
    for module in model.modules():
        vars(module).pop(_RECORD, None)


def missing(model: nn.Module) -> Iterator[tuple[str, nn.Module | None]]:
    """Yield names of what held prepared modules, and the module of that name now, which holds no quantised weight."""
    for fqn, module in model.named_modules():
        for name in sorted(vars(module).get(_RECORD, ())):
            child = module._modules.get(name)
            # A child with a record was not replaced: what it lacks is named below it.
            if child is None or not (_RECORD in vars(child) or any(_is_quantised(m) for m in child.modules())):
                yield f"{fqn}.{name}" if fqn else name, child


def _is_quantised(module: nn.Module) -> bool:
    return isinstance(module, PreparedModule) or any(is_packed(p) for p in module._parameters.values())
