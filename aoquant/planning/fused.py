"""Layers that engines fuse into one GEMM, q, k, v and gate, up, and the outer scale that they then share.

vLLM takes one outer scale of the fused layers for all of them, with a mere warning: the codes of the others then mean
other values. So layers of nvfp4-pow2 share the largest one of their group: held scales whenever they are measured, on
prepare and by `calibrate`, and scales of weights that are quantised at once. Powers of two cost nothing there (0.00 dB
on the demo model). Scales that are made in every forward are each layer's own, and export refuses them.

Groups are found by names in one module, as Hugging Face's models have them and vLLM's packed_modules_mapping lists
them, or are given; the model remembers given ones. Stacked experts need no sharing: gate and up are rows of one matrix.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from aoquant.formats import Operand, Scales
from aoquant.linear import held
from aoquant.linear.prepared import QATLinear
from aoquant.linear.recipe import LinearRecipe
from aoquant.planning.changes import Change

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
GIVEN = "aoquant_fused_groups"  # attribute of a module: groups that were given, by names within it


def siblings(names: Iterable[str], modules: Mapping[str, nn.Module] | None = None) -> list[list[str]]:
    """Groups of at least two of the modules called `names` that engines fuse; groups that overlap are one.

    modules: of the model, by name, which remember the groups that `share_outer_scales` was given.
    """
    ordered = list(names)
    known, groups = set(ordered), list[set[str]]()
    alike = [
        [name.removesuffix(group[0]) + own for own in group]
        for name in ordered
        for group in FUSED
        if name.rpartition(".")[2] == group[0]
    ]
    given = [
        [f"{owner}.{name}" if owner else name for name in group]
        for owner, module in (modules or {}).items()
        for group in vars(module).get(GIVEN, ())
    ]
    for group in (*alike, *given):
        joined = known.intersection(group)
        for other in [g for g in groups if not g.isdisjoint(joined)]:
            joined |= other
            groups.remove(other)
        groups.append(joined)
    return [[name for name in ordered if name in group] for group in groups if len(group) > 1]


@torch.no_grad()
def share_outer_scales(model: nn.Module, groups: Sequence[Sequence[str]] | None = None) -> int:
    """Give each group of prepared nvfp4-pow2 layers with static weight scales its largest outer scale, and its largest
    calibrated one of activations; returns the groups.

    groups: names of further layers that the engine will fuse, beside those of `FUSED`. The model remembers them, in
        memory: `calibrate` shares anew, and export of the converted model checks them. A saved checkpoint does not
        hold them.

    Raises:
        ValueError: a given name is no such layer's.
    """
    modules = dict(model.named_modules())
    layers = {name: m for name, m in modules.items() if isinstance(m, QATLinear) and shares(m.prepared.recipe)}
    if groups is not None:
        if wrong := [n for group in groups for n in group if n not in layers]:
            raise ValueError(
                f"{wrong[0]} is no prepared layer with format nvfp4-pow2 and scales='static'; there are {len(layers)}"
            )
        vars(model)[GIVEN] = [*vars(model).get(GIVEN, ()), *map(list, groups)]
    found = siblings(layers, modules)
    for group in found:
        members = [layers[name] for name in group]
        _share(members, "weight")
        _share([m for m in members if m.calibrated and _has_powers(m.prepared.recipe.fprop_input)], "input")
    return len(found if groups is None else groups)


def _share(layers: Sequence[QATLinear], side: str) -> None:
    scales = [outer for layer in layers if (outer := held.read(layer, side).outer) is not None]
    if not scales:
        return
    largest = _largest(scales)
    for layer, own in zip(layers, scales, strict=True):
        held.write(layer, side, Scales(outer=largest.to(own.device)), own.dim())


def shares(recipe: LinearRecipe) -> bool:
    """Return whether layers that train `recipe` share their weights' outer scale with siblings."""
    return _has_powers(recipe.fprop_weight) and recipe.weight_scales == "static"


def _has_powers(operand: Operand | None) -> bool:
    return operand is not None and operand.transform is None and operand.format.power_of_two


def _largest(outers: Sequence[Tensor]) -> Tensor:
    """(1, 1), on the first one's device."""
    return reduce(torch.maximum, [outer.reshape(1, 1).to(outers[0].device) for outer in outers])


@torch.no_grad()
def shared_at_once(changes: Iterable[Change], weight_of: Callable[[Change], Tensor]) -> dict[str, Scales]:
    """The outer scale of every layer that is quantised to nvfp4-pow2 at once, without training, and has siblings, by
    the fqn of its change.

    weight_of: the weight (N, K) of the layer of a change, asked for once.
    """
    own = {c.fqn: c for c in changes if c.step == "quantize" and _has_powers(c.target.recipe.fprop_weight)}
    found: dict[str, Scales] = {}
    for group in siblings(own):
        outers = [o for name in group if (o := _measured(own[name], weight_of(own[name]))) is not None]
        if len(outers) == len(group):
            found |= dict.fromkeys(group, Scales(outer=_largest(outers)))
    return found


def _measured(change: Change, weight_NK: Tensor) -> Tensor | None:
    """(1, 1): the outer scale of a weight; None where it has no values here."""
    if weight_NK.is_meta or isinstance(weight_NK, DTensor):
        return None
    return change.target.recipe.fprop_weight.measure(weight_NK.to(change.dtype)).outer
