"""The routers of a mixture-of-experts model: the modules that give each token its experts.

A router stands beside the experts in one module, and one of its parameters has a row for each expert. Its name and its
class are the model's own ("gate", "router"), so they are not asked.

`READ_LINEARS` lists the classes of routers that hold an nn.Linear and multiply by its weight themselves. Prepared, it
would compute float numbers, and converted others, so it is a router's weight like any other and stays float.
"""

from __future__ import annotations

from torch import nn

from aoquant.layers.experts import stacks_of

READ_LINEARS = {"LongcatFlashTopkRouter": "classifier"}  # class of the router: its linear layer


def is_read_by_router(model: nn.Module, fqn: str) -> bool:
    """Whether a layer's weight is read by the router that holds it."""
    parent, _, own = fqn.rpartition(".")
    return any(READ_LINEARS.get(c.__name__) == own for c in type(model.get_submodule(parent)).__mro__)


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    """The modules with stacked experts, by name."""
    return {name: m for name, m in model.named_modules() if stacks_of(m)}


def routers_of(model: nn.Module) -> dict[str, nn.Module]:
    """The routers of a model's stacked experts, by name."""
    found = dict[str, nn.Module]()
    for name, experts in experts_of(model).items():
        parent = name.rpartition(".")[0]
        rows = getattr(experts, stacks_of(experts)[0]).shape[0]
        beside = _beside(model, parent, rows)
        if not beside and "expert" in parent.rpartition(".")[2]:  # Aria's experts are two modules in one
            beside = _beside(model, parent.rpartition(".")[0], rows)
        found |= beside
    return found


def _beside(model: nn.Module, parent: str, experts: int) -> dict[str, nn.Module]:
    """The children of a module that have a matrix with a row for each expert, by name."""
    return {
        f"{parent}.{own}" if parent else own: module
        for own, module in model.get_submodule(parent).named_children()
        if "expert" not in own and any(p.dim() == 2 and len(p) == experts for p in module.parameters())
    }


def freeze_routers(model: nn.Module) -> list[str]:
    """Train a model with its routers as they are: their parameters get no gradient; returns the routers' names.

    Tokens may still change experts, because what reaches a router is trained: `aoquant.router_drift` counts them.

    Raises:
        ValueError: the model has no router beside stacked experts.

    Example:

            freeze_routers(model)  # before the optimizer is made
    """
    routers = routers_of(model)
    if not routers:
        raise ValueError(
            f"freeze_routers: no router beside stacked experts in {type(model).__name__}: set requires_grad by hand"
        )
    for router in routers.values():
        router.requires_grad_(False)
    return list(routers)
