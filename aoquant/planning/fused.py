"""Layers that engines fuse into one GEMM, q, k, v and gate, up, and the outer scale that they then share.

vLLM takes the largest outer scale of the fused layers for all of them, with a mere warning: the codes of the others
then mean other values. So layers that train nvfp4-pow2 with held scales share the largest one of their group from the
start: whenever held scales are measured, on prepare and by `calibrate`. Powers of two cost nothing there (0.00 dB on
the demo model). Groups are found by names in one module, as Hugging Face's models have them and vLLM's
packed_modules_mapping lists them, or are given.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce

import torch
from torch import nn

from aoquant.formats import NVFP4PowerOfTwo, Scales
from aoquant.layers import held
from aoquant.layers.qat import QATLinear

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))


def siblings(names: Iterable[str]) -> list[list[str]]:
    """Groups of at least two of the modules called `names` that engines fuse."""
    ordered = list(names)
    known, groups = set(ordered), []
    for name in ordered:
        parent, _, own = name.rpartition(".")
        for group in FUSED:
            if own == group[0]:
                found = [n for n in (f"{parent}.{s}" if parent else s for s in group) if n in known]
                groups += [found] if len(found) > 1 else []
    return groups


@torch.no_grad()
def share_outer_scales(model: nn.Module, groups: Sequence[Sequence[str]] | None = None) -> int:
    """Give each group of prepared nvfp4-pow2 layers with static weight scales its largest outer scale; returns the
    groups.

    groups: names of layers that the engine will fuse; by default those of `FUSED`.

    Raises:
        ValueError: a given name is no such layer's.
    """
    layers = {name: m for name, m in model.named_modules() if isinstance(m, QATLinear) and _shares(m)}
    if groups is not None and (wrong := [n for group in groups for n in group if n not in layers]):
        raise ValueError(
            f"{wrong[0]} is no prepared layer with format nvfp4-pow2 and scales='static'; there are {len(layers)}"
        )
    found = siblings(layers) if groups is None else groups
    for group in found:
        scales = [held.read(layers[name], "weight").outer for name in group]
        largest = reduce(torch.maximum, [s for s in scales if s is not None])
        for name in group:
            held.write(layers[name], "weight", Scales(outer=largest))
    return len(found)


def _shares(layer: QATLinear) -> bool:
    recipe = layer.prepared.recipe
    return (
        recipe.transform is None
        and isinstance(recipe.fprop_weight.format, NVFP4PowerOfTwo)
        and recipe.weight_scales == "static"
    )
