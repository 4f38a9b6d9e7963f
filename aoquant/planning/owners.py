"""Layers whose forward or weight is another object's: a step taken on them would have no effect, or the wrong one.

- A weight that is recomputed before every forward: `torch.nn.utils.weight_norm`, `spectral_norm` and `prune` take the
  parameter away, keep another one ("weight_g", "weight_orig"), and set `weight` from a hook. Codes made of it now
  would be overwritten, or never used.
- A forward that is replaced on the instance, so that the prepared class's forward never runs.
- A forward that belongs to another model: a trainer replaced `model.forward` by a function that holds the original,
  and `copy.deepcopy` copies modules but not functions, so the copy runs the original's layers.
"""

import functools
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

DEPTH = 8  # wrappers around a forward that are looked through


def why_not(module: nn.Module, step: str) -> str | None:
    """Return why a step ("prepare", "convert", "quantize") cannot be taken on this very layer; None when it can."""
    if "weight" not in module._parameters:
        return _recomputed(module)
    weight = module._parameters["weight"]
    replaced = "forward" in vars(module) and "_old_forward" not in vars(module)  # accelerate's hooks are followed
    if replaced and isinstance(weight, DTensor):
        return (
            "its weight is sharded and its forward replaced on the instance, as transformers' tp_plan does, so another forward would never "
            "run: load the model without tp_plan, prepare it, and shard it with parallelize_module or fully_shard"
        )
    if step == "prepare":
        if replaced:
            return "its forward is replaced on the instance, so a prepared forward would never run: remove the replacement first"
    elif weight is not None and weight.is_meta and hasattr(module, "_hf_hook"):
        return (
            "accelerate keeps its weight offloaded, so there is nothing here to quantise: load the model without offload "
            "(another device_map), or convert the checkpoint itself with `aoquant convert`"
        )
    return None


def changed_class(module: nn.Module) -> str:
    """Return why a prepared layer whose class something replaced cannot be converted, and what to do."""
    parts = list(getattr(module, "parametrizations", ()))
    if not parts:
        return f"is prepared, and something made a {type(module).__name__} of it since: restore its class, or call aoquant.unprepare(model)"
    return (
        f"is prepared, and torch.nn.utils.parametrize recomputes its {' and '.join(parts)} since, so codes would not be used: call "
        f"torch.nn.utils.parametrize.remove_parametrizations(layer, {parts[0]!r}) first"
    )


def _recomputed(module: nn.Module) -> str:
    """Return why a hook that recomputes the layer's weight is refused, and how to remove it."""
    hooks = {cls.__name__ for hook in module._forward_pre_hooks.values() for cls in type(hook).__mro__}
    if "BasePruningMethod" in hooks:
        return (
            "torch.nn.utils.prune recomputes its weight from weight_orig and weight_mask before every forward: make the pruning permanent "
            "first, with torch.nn.utils.prune.remove(layer, 'weight')"
        )
    for name, remove in (("WeightNorm", "remove_weight_norm"), ("SpectralNorm", "remove_spectral_norm")):
        if name in hooks:
            return f"{name} recomputes its weight before every forward: call torch.nn.utils.{remove}(layer) first, or leave it out"
    return "its weight is no parameter, so something recomputes it: make it an nn.Parameter, or leave the layer out"


def borrowed(model: nn.Module) -> str | None:
    """Return which forward in `model` runs another model, and what to do; None where none does."""
    own = {id(m) for m in model.modules()}
    for fqn, module in model.named_modules():
        for other in _modules_behind(vars(module).get("forward")):
            # an object of the same class that is neither here nor around: the one that `module` is a copy of
            if type(other) is type(module) and id(other) not in own and all(m is not module for m in other.modules()):
                where = f"{fqn}.forward" if fqn else "forward"
                return (
                    f"{where} of this {type(module).__name__} is a replacement that calls another {type(module).__name__}: the model is a "
                    "copy (copy.deepcopy) of one whose forward a trainer or a wrapper replaced on the instance, and would run the "
                    f"original's layers. Remove the replacement from the copy (del {'.'.join(filter(None, ('model', fqn)))}.forward), or "
                    "copy the model before it is given to the trainer"
                )
    return None


def _modules_behind(forward: Any) -> Iterator[nn.Module]:
    """Modules that a callable holds: what its methods are bound to, its wrappers' arguments and closures."""
    seen: set[int] = set()
    found = [forward]
    for _ in range(DEPTH):
        held: list[Any] = []
        for item in found:
            if id(item) in seen:
                continue
            seen.add(id(item))
            if isinstance(item, nn.Module):
                yield item
            elif isinstance(item, MethodType):
                held += [item.__self__, item.__func__]
            elif isinstance(item, functools.partial):
                held += [item.func, *item.args, *item.keywords.values(), *vars(item).values()]
            elif isinstance(item, FunctionType):
                cells = item.__closure__ or ()
                held += [getattr(item, "__wrapped__", None), *(_content(cell) for cell in cells)]
            elif callable(item) and hasattr(item, "__dict__") and not isinstance(item, type):
                held += vars(item).values()
        found = [item for item in held if callable(item)]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None
