"""Which data-parallel rank a layer is on: ranks with tokens of their own draw random numbers of their own.

The ranks that matter are those over which the gradients of the layer's weight are averaged. FSDP2 and DDP do that, and
know the ranks; nothing else is guessed from, because ranks that hold one weight and see the same tokens (beside tensor
parallelism, say) have to draw the same, or their weights would drift apart.

FSDP2 has no public way from a layer to its mesh: its private table of states is read here. Where another torch keeps it
elsewhere, ranks draw alike, which costs a little noise and no correctness.
"""

import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

RANK = "_data_rank"  # attribute of a layer that draws: its rank, None while it is not known
_waiting: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_looked: tuple[int, ...] = ()  # what there was to find at the last look


def expect(layer: nn.Module) -> None:
    """`find` will tell `layer` its rank."""
    vars(layer)[RANK] = None
    _waiting.add(layer)


def of(layer: Any) -> int:
    """The rank of `layer`, which draws; 0 where there is none to be found (yet)."""
    # A compiler keeps the first value of an attribute that it reads: `find` comes before.
    if torch.compiler.is_compiling() or layer._data_rank is None:
        find()
    rank: int | None = layer._data_rank
    return rank or 0


@torch.compiler.assume_constant_result
def find() -> None:
    """Tell every waiting layer its rank among those that share out its tokens, once FSDP2 or DDP has it.

    A compiler calls it while it traces, and guards on the layers' ranks, which are equal, so that blocks share code; it
    does not trace again when DDP wraps a model afterwards. An answer stays: activations are recomputed outside of DDP's
    forward.
    """
    global _looked
    if not (dist.is_available() and dist.is_initialized()):
        return
    ddp: Any = getattr(DistributedDataParallel, "_active_ddp_module", None)
    states = _fsdp_states()
    there = len(states), id(ddp), len(_waiting)
    if there == _looked:
        return
    for module, mesh in _sharded_by(states):
        if module in _waiting:
            vars(module)[RANK] = flat_rank(mesh)
    if ddp is not None:
        for module in ddp.module.modules():
            if module in _waiting:
                vars(module)[RANK] = dist.get_rank(ddp.process_group)
    for module in [m for m in _waiting if vars(m).get(RANK) is not None]:
        _waiting.discard(module)
    _looked = len(states), id(ddp), len(_waiting)


def flat_rank(mesh: DeviceMesh) -> int:
    """This process's place in a mesh of any number of dimensions, row-major."""
    rank = 0
    for size, here in zip(mesh.shape, mesh.get_coordinate() or (0,) * mesh.ndim, strict=True):
        rank = rank * size + here
    return rank


def _fsdp_states() -> list[Any]:
    try:
        from torch.distributed._composable_state import _module_state_mapping as states
    except ImportError:
        return []
    return [s() if isinstance(s, weakref.ReferenceType) else s for s in list(states.values())]


def _sharded_by(states: list[Any]) -> Iterator[tuple[nn.Module, DeviceMesh]]:
    """(module, mesh) of every parameter that FSDP2 shards."""
    for state in states:
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for group in groups:
            for p in getattr(group, "fsdp_params", ()):
                for module in (p._module_info.module, *p._module_info.shared_modules):
                    yield module, group.mesh_info.mesh
