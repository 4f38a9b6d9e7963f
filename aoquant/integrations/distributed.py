"""Sharded models put together: the state dict of the model that would have been converted in one piece.

A layer that was converted while sharded holds `PackedTensor` shards whatever its config deploys. Gathered, they become
the tensor that the config names, torchao's included.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from aoquant._messages import check_model
from aoquant.distributed.fsdp import reshard
from aoquant.experts import sharded
from aoquant.experts.packed_experts import PackedExperts
from aoquant.integrations.gather import quantized_all_gather
from aoquant.linear.sharded_packed import ShardedLinear, gather
from aoquant.targets import resolve

__all__ = ["full_state_dict", "quantized_all_gather"]


@torch.no_grad()
def full_state_dict(model: nn.Module, *, cpu_offload: bool = False) -> dict[str, Tensor]:
    """Return the state dict of `model` with whole tensors: gathered floats, and what converted layers deploy.

    A collective: every rank calls it. cpu_offload: gather one tensor at a time to the CPU of rank 0; other ranks get an
    empty dict. Load it with `load_state_dict(..., assign=True)`. Under a mixed precision policy, what forward computed
    in param_dtype is here in that dtype (converted weights) or in the parameter's own (the rest): cast the rest to
    compute the same.
    """
    check_model(model)
    reshard(model)
    keep = not cpu_offload or dist.get_rank() == 0
    done: dict[int, Tensor] = {}  # tied weights stay tied
    state: dict[str, Tensor] = {}
    layers = {f"{fqn}.weight" if fqn else "weight": m for fqn, m in model.named_modules(remove_duplicate=False)}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in done:
            whole = _whole(tensor, layers.get(name)).detach()
            done[id(tensor)] = whole.cpu() if cpu_offload and keep else whole
        if keep:
            state[name] = done[id(tensor)]
        else:
            done[id(tensor)] = tensor
    return state


def _whole(tensor: Tensor, layer: nn.Module | None) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    if isinstance(tensor.to_local(), PackedExperts):
        return sharded.gather(tensor)
    if not isinstance(layer, ShardedLinear):
        return tensor.full_tensor()
    like = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return resolve(layer.aoquant_config).build(gather(tensor), like)
