"""Layers that engines fuse into one: q, k, v and gate, up. One GEMM has one outer scale, so they must share it.

vLLM takes the largest of the fused layers' outer scales for all of them, with a mere warning: the codes of the others then mean other
values. Siblings are found by their names in one module, as Hugging Face's models call them and vLLM's packed_modules_mapping lists them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))


def siblings(modules: Iterable[str]) -> list[list[str]]:
    """Groups of at least two modules that engines fuse, by name."""
    names = list(modules)
    known, groups = set(names), []
    for name in names:
        parent, _, own = name.rpartition(".")
        for group in FUSED:
            if own == group[0]:
                found = [n for n in (f"{parent}.{sibling}" if parent else sibling for sibling in group) if n in known]
                groups += [found] if len(found) > 1 else []
    return groups


def check_fused(outer: Mapping[str, Tensor]) -> None:
    """Raise ValueError for siblings with different outer scales, given by module."""
    for group in siblings(outer):
        first = outer[group[0]]
        if not all(torch.equal(first.reshape(-1), outer[name].reshape(-1)) for name in group):
            scales = ", ".join(f"{name.rpartition('.')[2]} {outer[name].flatten()[0].item():.6g}" for name in group)
            raise ValueError(
                f"{group[0].rpartition('.')[0]}: an engine fuses these layers under one outer scale, and theirs differ ({scales}): train "
                "the recipe vllm-nvfp4, or aoquant.fuse_outer_scales(model) before training; nothing was written"
            )
