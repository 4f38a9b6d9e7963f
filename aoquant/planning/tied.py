"""Sharing: one module under several names, and one weight in several modules.

A block called twice, an output head that is the input embedding: every module is planned once, with all its names, and
a shared weight is quantised for all of its users, with one config and into one packed tensor, or for none. A weight is
shared when it is one parameter, or one memory: two `nn.Parameter`s over the same elements are tied too.
"""

from collections.abc import Hashable

from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from aoquant._messages import advice
from aoquant.linear.kinds import is_layer, kind_of, why_no_kind
from aoquant.linear.recipe import LinearRecipe


def modules(model: nn.Module) -> list[tuple[list[str], nn.Module]]:
    """Every module, once, behind all of its fully qualified names."""
    found: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        found.setdefault(module, []).append(name)
    return [(names, module) for module, names in found.items()]


def identity(weight: Tensor) -> Hashable:
    """The identity of a weight, equal for tied ones: the parameter, or the same elements of the same memory."""
    if is_traceable_wrapper_subclass(weight) or weight.numel() == 0:
        return id(weight)
    try:
        return weight.untyped_storage()._cdata, weight.storage_offset(), weight.numel()
    except (NotImplementedError, RuntimeError):  # a tensor class without memory of its own
        return id(weight)


def problems(model: nn.Module, chosen: dict[int, LinearRecipe]) -> list[str]:
    """Return why weights that several modules hold cannot be quantised: a module left out, or two configs.

    chosen: by the id of each module whose weight is to be quantised, its recipe.
    """
    users: dict[Hashable, list[tuple[str, nn.Module]]] = {}
    for names, module in modules(model):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                user = ", ".join(f"{n}.{name}" if n else name for n in names)
                users.setdefault(identity(parameter), []).append((user, module))
    found = []
    for sharers in users.values():
        if len(sharers) < 2 or not (recipes := {chosen[id(m)] for _, m in sharers if id(m) in chosen}):
            continue
        label = f"{_names(sharers, chosen, True)}: its weight is tied ({', '.join(u for u, _ in sharers)})"
        unable = [why_no_kind(m) for _, m in sharers if id(m) not in chosen and is_layer(m) and kind_of(m) is None]
        if unable:
            found.append(
                f"{label}, and {_names(sharers, chosen, False)} cannot be quantised: {'; '.join(unable)}. Leave the layers of this weight "
                f"out {advice('(filter_fn, or None for their names in FqnToConfig)', 'with --skip NAME')}"
            )
        elif any(id(m) not in chosen for _, m in sharers):
            left = _names(sharers, chosen, False)
            both = advice("choose both, with one config, by filter_fn or FqnToConfig", "choose both, by --embeddings")
            found.append(
                f"{label}, and the config leaves out {left}, so converting would untie it: {both}; "
                f"or leave both out; or untie first, {left}.weight = nn.Parameter({left}.weight.detach().clone())"
            )
        elif len(recipes) > 1:
            found.append(f"{label}, but the layers have different configs: give them one")
    return found


def _names(sharers: list[tuple[str, nn.Module]], chosen: dict[int, LinearRecipe], wanted: bool) -> str:
    """The modules among `sharers` that are chosen, or not."""
    return ", ".join(u.removesuffix(".weight") for u, m in sharers if (id(m) in chosen) == wanted)
