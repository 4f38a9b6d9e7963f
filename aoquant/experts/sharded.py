"""Experts that ranks share out along their first dimension, as FSDP2 and expert parallelism do (DTensor, Shard(0)).

A rank then holds whole experts, so it encodes its own without a word to others. A forward meets a DTensor in two cases:

- expert parallelism, prepared or converted: every rank has all tokens, computes those of its own experts, and the
  results of all ranks are summed; gradients of tokens and of routing weights are summed in backward.
- FSDP2, converted: ranks have tokens of their own, so the codes and scales are gathered for the call, at a fraction of
  the float bytes. For prepared experts FSDP2 puts the whole float parameters in their place.

Which of them it is, is noted on the module when it is converted. The forward itself is the module's own: it runs with
other parameters in their places.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from aoquant.distributed.fsdp import GATHER
from aoquant.distributed.sharded_linear import gathered
from aoquant.linear.recipe import LinearRecipe
from aoquant.linear.tensor import parts_of

GATHERS = "_aoquant_gathers"  # attribute of a module whose packed experts are gathered for a forward
# Attribute of transformers' experts, from 5.24 on: its forwards skip the number behind the last expert only where this
# is true. Earlier ones always do.
MASKS = "_is_expert_parallel"
Forward = Callable[..., Tensor]


def why_not(weight: Any, step: str, recipe: LinearRecipe, *, managed: bool) -> str | None:
    """Return why a step ("prepare", "convert", "quantize") cannot be taken on sharded experts; None when it can.

    managed: FSDP shards them, and hands whole ones to forward.
    """
    if not isinstance(weight, DTensor) or (managed and step == "prepare"):
        return None
    if not _by_expert(weight):
        return f"it is sharded other than by expert, {list(weight.placements)}: {GATHER}, and quantise that"
    if not managed and (recipe.draws or recipe.holds):
        what = "a backward that draws random numbers" if recipe.draws else "a parameter with held scales"
        return f"it is sharded by expert, and {what} needs all experts on a rank: use fully_shard"
    return None


def first_of(weight: DTensor) -> int:
    """The number of this rank's first expert."""
    at = _dim(weight)
    size = -(-weight.shape[0] // weight.device_mesh.size(at))
    return min(weight.device_mesh.get_local_rank(at) * size, weight.shape[0])


def runs_eagerly(module: Any) -> bool:
    """Return whether transformers runs the class's own forward, which adds up expert by expert."""
    return getattr(getattr(module, "config", None), "_experts_implementation", None) in (None, "eager")


def run(module: Any, forward: Forward, x: Tensor, index: Tensor, weights: Tensor, *, skips: bool) -> Tensor:
    """Return what `forward(module, x, index, weights)` computes with all experts: (T, H).

    x: (T, H). index, weights: (T, top k), the experts of each token and their weights. skips: whether forward takes the
        number E for no expert, which transformers' own eager forward does not.
    """
    sharded = {n: p for n, p in module._parameters.items() if isinstance(p, DTensor)}
    if not sharded:
        return forward(module, x, index, weights)
    if vars(module).get(GATHERS):
        with _in_place(module, {n: gather(p) for n, p in sharded.items()}, module.num_experts):
            return forward(module, x, index, weights)
    if not skips:
        raise ValueError(
            "experts_implementation='eager' runs converted or float experts with all experts on a rank, and they are sharded by expert: call "
            "model.set_experts_implementation('grouped_mm')"
        )
    return _on_own(module, forward, sharded, x, index, weights)


def _on_own(
    module: Any, forward: Forward, sharded: dict[str, DTensor], x: Tensor, index: Tensor, weights: Tensor
) -> Tensor:
    name, one = next(iter(sharded.items()))
    if wrong := next((n for n, p in sharded.items() if not _by_expert(p) or p.device_mesh != one.device_mesh), None):
        raise ValueError(f"{wrong} is sharded other than by expert on the mesh of {name}: use Shard(0), or fully_shard")
    mesh, at, first = one.device_mesh, _dim(one), first_of(one)
    local = {n: p.to_local() for n, p in sharded.items()}
    count = len(local[name])
    whole: list[Placement] = [Replicate()] * mesh.ndim
    partial: list[Placement] = [Partial() if d == at else Replicate() for d in range(mesh.ndim)]

    def placed(t: Tensor, placements: list[Placement]) -> DTensor:
        return DTensor.from_local(t, mesh, placements, run_check=False)

    def own(t: Tensor) -> Tensor:
        """All ranks have it, and each finds a part of its gradient."""
        everywhere = t.redistribute(placements=whole) if isinstance(t, DTensor) else placed(t, whole)
        return everywhere.to_local(grad_placements=partial)

    mine, mine_weights = own(x), own(weights)
    ids = index.full_tensor() if isinstance(index, DTensor) else index
    # the number behind the last expert means none: transformers skips it, and so do prepared experts
    ids = torch.where((ids >= first) & (ids < first + count), ids - first, count)
    plain = {n: p[first : first + count] for n, p in module._parameters.items() if p is not None and n not in sharded}
    with _in_place(module, local | plain, count):
        y = forward(module, mine, ids, mine_weights.masked_fill(ids == count, 0)) if count else torch.zeros_like(mine)
    if torch.is_grad_enabled():  # a rank without tokens takes part in the sums of backward, too
        y = y + sum(t[:0].sum() for t in (mine, mine_weights, *local.values()) if t.requires_grad)
    summed = placed(y, partial).redistribute(placements=whole)
    return summed if isinstance(x, DTensor) else summed.to_local()


@contextmanager
def _in_place(module: Any, parameters: dict[str, Any], experts: int) -> Iterator[None]:
    """The module with other parameters, and another number of experts."""
    before, number = dict(module._parameters), module.num_experts
    masks = vars(module).get(MASKS)
    module._parameters.update(parameters)
    module.num_experts = experts
    if masks is not None:
        setattr(module, MASKS, masks or experts < number)
    try:
        yield
    finally:
        module._parameters.update(before)
        module.num_experts = number
        if masks is not None:
            setattr(module, MASKS, masks)


def gather(w: DTensor) -> Any:
    """All experts' codes and scales, on every rank. A collective."""
    local: Any = w.to_local()
    how = w.device_mesh, w.placements, [Replicate()] * w.device_mesh.ndim

    def whole(part: Tensor) -> Tensor:
        return gathered(part, *how, (w.shape[0], *part.shape[1:]))

    return local._with([None if part is None else whole(part) for part in parts_of(local)])


def _by_expert(w: DTensor) -> bool:
    """Return whether one dimension of the mesh shares out experts, and the others hold copies."""
    shards = [p for p in w.placements if not isinstance(p, Replicate)]
    return len(shards) == 1 and type(shards[0]) is Shard and shards[0].dim == 0


def _dim(w: DTensor) -> int:
    """The dimension of the mesh that shares out experts."""
    return next(d for d, p in enumerate(w.placements) if not isinstance(p, Replicate))


class ShardedExperts(nn.Module):
    """Converted experts that ranks share out; made at run time for a plain class, whose forward it is."""

    plain: type[nn.Module]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """(T, H) of hidden_states (T, H), and the experts and their weights (T, top k) of each token."""
        skips = not runs_eagerly(self)
        return run(self, self.plain.forward, hidden_states, top_k_index, top_k_weights, skips=skips)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """The class is made at run time, so that copies and pickles name the plain one."""
        return _empty, (self.plain,), self.__dict__


_classes: dict[type[nn.Module], type[ShardedExperts]] = {}


def sharded_class(plain: type[nn.Module]) -> type[ShardedExperts]:
    """The class of converted, sharded experts of a plain class: one for each."""
    if issubclass(plain, ShardedExperts):
        return plain
    members = {"plain": plain, "__module__": __name__}
    return _classes.get(plain) or _classes.setdefault(
        plain, type(f"Sharded{plain.__name__}", (ShardedExperts, plain), members)
    )


def _empty(plain: type[nn.Module]) -> ShardedExperts:
    cls = sharded_class(plain)
    return cls.__new__(cls)
