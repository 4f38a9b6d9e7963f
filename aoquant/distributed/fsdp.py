"""Facts about FSDP2 (`fully_shard`) and its kin `replicate` that aoquant relies on.

They make a module theirs by swapping its class for a new one, FSDP<X>(FSDPModule, X), and they put their own parameters
back into it around every forward. Three consequences:

- the class of a layer is to be read, and swapped, beneath theirs;
- under a mixed precision policy a forward sees weights cast to the policy's param_dtype, and encodes those; so does
  convert;
- a converted weight is no longer theirs: a group that kept it would gather the float weight into its place at the next
  forward.

The last two read FSDP's private lists (torch has no way to take a parameter back), each in one place; when another
torch has other ones, converting says so.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

GATHER = "on every rank take aoquant.integrations.distributed.full_state_dict(model), load it with assign=True into an unsharded model"


def layer_class(module: nn.Module) -> type[nn.Module]:
    """The class of `module` beneath FSDP's."""
    cls = type(module)
    return cls.__bases__[-1] if isinstance(module, FSDPModule) else cls


def swap_class(module: nn.Module, new: type[nn.Module]) -> None:
    """Make `module` a `new`, in place, beneath FSDP's class if it has one."""
    cls, old = type(module), layer_class(module)
    if old is not cls:
        members = {k: v for k, v in vars(cls).items() if k == "__deepcopy__"}
        name = cls.__name__.removesuffix(old.__name__) + new.__name__
        new = type(name, (*cls.__bases__[:-1], new), members)
    module.__class__ = new


def reshard(model: nn.Module) -> None:
    """Let every module of `model` hold its sharded parameters, the ones that an optimizer updates."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def compute_dtypes(model: nn.Module) -> dict[int, torch.dtype]:
    """id of each parameter that FSDP shards in `model` -> dtype that a forward sees it in.

    Raises:
        ValueError: the layout of FSDP's state is not the one known here.
    """
    return {
        id(p.sharded_param): group.mp_policy.param_dtype or p.sharded_param.dtype
        for _, group in _groups(model)
        for p in group.fsdp_params
    }


def sharded_parameters(model: nn.Module) -> list[tuple[Any, Any]]:
    """(group, FSDP's record of the parameter) of everything that FSDP2 shards in `model`.

    Raises:
        ValueError: the layout of FSDP's state is not the one known here.
    """
    return [(group, p) for _, group in _groups(model) for p in group.fsdp_params]


def gather(p: Any, shard: torch.Tensor) -> None:
    """Let FSDP2 gather `shard` for its record p of a parameter, from the next forward on."""
    p.sharded_param._local_tensor = shard
    p._init_extensions()
    vars(p).pop("_unsharded_param", None)  # of a forward before this one
    p.all_gather_outputs = []


def gather_values(model: nn.Module) -> None:
    """Let FSDP2 gather all weights of `model` as values again, those too that `quantized_all_gather` made it gather as
    codes.
    """
    for _, p in sharded_parameters(model):
        if hasattr(p.sharded_param._local_tensor, "gathering"):
            gather(p, p.sharded_param._local_tensor.as_subclass(torch.Tensor))


def is_distributed(model: nn.Module) -> bool:
    """Return whether ranks share out the parameters of `model`, by FSDP or by tensor parallelism: its layers run
    together, or not at all.
    """
    wrappers = (FSDPModule, FullyShardedDataParallel)
    return any(isinstance(m, wrappers) for m in model.modules()) or any(
        isinstance(p, DTensor) for p in model.parameters()
    )


def is_managed(module: nn.Module) -> bool:
    """Return whether FSDP shards the parameters of `module`, here or from above."""
    return getattr(module, "_is_fsdp_managed_module", False) and isinstance(getattr(module, "weight", None), DTensor)


def is_flattened(module: nn.Module) -> bool:
    """Return whether FSDP1 holds the parameters of `module`, as parts of one long vector: its weight is a view that
    comes and goes.
    """
    if isinstance(module, FSDPModule) or not hasattr(module, "_fsdp_use_orig_params"):
        return False
    return hasattr(module.weight, "_fsdp_flattened") or "weight" not in module._parameters


def release(model: nn.Module, weights: Collection[int]) -> None:
    """Take the parameters with these ids out of FSDP's groups."""
    for state, group in _groups(model):
        for p in group.fsdp_params:
            if id(p.sharded_param) in weights:
                p._post_load_hook_handle.remove()
        group.fsdp_params = [p for p in group.fsdp_params if id(p.sharded_param) not in weights]
        if group.fsdp_params:
            continue
        if hasattr(state, "_fsdp_param_groups"):
            state._fsdp_param_groups.remove(group)
        else:
            state._fsdp_param_group = None


def _groups(model: nn.Module) -> list[tuple[Any, Any]]:
    """(state, parameter group) of the FSDP modules in `model`, each group once: one state may have several modules."""
    found: dict[int, tuple[Any, Any]] = {}
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        state: Any = module._get_fsdp_state()
        if hasattr(state, "_fsdp_param_groups"):  # torch >= 2.12; one group before
            groups = state._fsdp_param_groups
        elif hasattr(state, "_fsdp_param_group"):
            groups = [state._fsdp_param_group]
        else:
            raise ValueError(
                f"torch {torch.__version__} keeps FSDP's parameters where aoquant does not find them: gather the state dict "
                "(torch.distributed.checkpoint.state_dict), load it into an unsharded model, and convert that"
            )
        found |= {id(group): (state, group) for group in groups if group is not None}
    return list(found.values())
