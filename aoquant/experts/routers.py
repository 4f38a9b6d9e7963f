"""The routers of a mixture-of-experts model: the modules that give each token its experts.

A router stands beside the experts in one module. It is called so ("router", "gate") or is of such a class, and a "gate"
has a row for each expert; where no module beside stacked experts has such a name, it is the one with a row for each.

A router decides what a token computes, and costs next to nothing. So all of it stays float unless a name or a filter
picks it, whether its matrix is a parameter (Mixtral, DeepSeek, gpt-oss) or an nn.Linear (Jamba, Aria, DBRX, Gemma 4).
Some classes also read that layer themselves: LongCat-Flash multiplies by its weight.
"""

import re

from torch import nn

from aoquant._messages import check_model
from aoquant.experts.families import stacks_of

_ROUTER = re.compile("router", re.IGNORECASE)
_GATE = re.compile(r"(^|_)(gate|gating|wg)$|(Gate|Gating)$")


def routers_of(model: nn.Module) -> dict[str, nn.Module]:
    """The routers of a model's experts, stacked or in a list, by name."""
    found = dict[str, nn.Module]()
    for parent, module in model.named_modules():
        numbers = _numbers_of_experts(module)
        if numbers is None:
            continue
        others = {own: child for own, child in module.named_children() if "expert" not in own}
        beside = {own: child for own, child in others.items() if any(p.dim() == 2 for p in child.parameters())}
        called = {own: child for own, child in beside.items() if _is_called_router(own, child, numbers)}
        stacked = any(stacks_of(child) for child in module.children())
        chosen = called or {own: child for own, child in beside.items() if stacked and _has_rows(child, numbers)}
        found |= {f"{parent}.{own}" if parent else own: child for own, child in chosen.items()}
    return found


def router_modules(model: nn.Module) -> set[int]:
    """Ids of the routers of a model and of all modules in them."""
    return {id(part) for router in routers_of(model).values() for part in router.modules()}


def _numbers_of_experts(module: nn.Module) -> set[int] | None:
    """The numbers of experts that children of a module have; None where none of them are experts."""
    numbers, found = set[int](), False
    for own, child in module.named_children():
        inside = (child, *child.children()) if "expert" in own else (child,)  # Aria's experts are two modules in one
        stacks = {getattr(m, name).shape[0] for m in inside for name in stacks_of(m)}
        others = "expert" in own and not isinstance(child, nn.Linear) and next(child.parameters(), None) is not None
        if not stacks and not others:
            continue
        found = True
        numbers |= stacks
        numbers |= {len(child)} if isinstance(child, nn.ModuleList | nn.ModuleDict) else set()
        numbers |= {n for n in (getattr(child, "num_experts", None),) if isinstance(n, int)}
    return numbers if found else None


def _is_called_router(own: str, module: nn.Module, numbers: set[int]) -> bool:
    names = own, type(module).__name__
    return any(map(_ROUTER.search, names)) or (any(map(_GATE.search, names)) and _has_rows(module, numbers))


def _has_rows(module: nn.Module, numbers: set[int]) -> bool:
    return any(p.dim() == 2 and len(p) in numbers for p in module.parameters())


def freeze_routers(model: nn.Module) -> list[str]:
    """Train a model with its routers as they are: their parameters get no gradient; returns the routers' names.

    Tokens may still change experts, because what reaches a router is trained: `aoquant.router_drift` counts them.

    Raises:
        ValueError: the model has no router beside experts.

    Example:

            freeze_routers(model)  # before the optimizer is made
    """
    check_model(model)
    routers = routers_of(model)
    if not routers:
        raise ValueError(
            f"freeze_routers: no router beside experts in {type(model).__name__}: set requires_grad by hand"
        )
    for router in routers.values():
        router.requires_grad_(False)
    return list(routers)
