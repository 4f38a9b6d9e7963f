"""The check at export that layers which engines fuse share their outer scale (`planning/fused.py` says why)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from aoquant.planning.fused import siblings


def unequal(outer: Mapping[str, Tensor]) -> list[list[str]]:
    """The groups of siblings whose outer scales, given by module, differ."""
    return [
        group
        for group in siblings(outer)
        if not all(torch.equal(outer[group[0]].reshape(-1), outer[name].reshape(-1)) for name in group)
    ]


def check_fused(outer: Mapping[str, Tensor]) -> None:
    """Raise ValueError that lists the siblings with different outer scales, given by module."""
    if not (groups := unequal(outer)):
        return
    lines = []
    for group in groups:
        scales = ", ".join(f"{name.rpartition('.')[2]} {outer[name].flatten()[0].item():.6g}" for name in group)
        lines.append(
            f"{group[0].rpartition('.')[0]}: an engine fuses these layers under one outer scale, and theirs differ ({scales})"
        )
    raise ValueError(
        "{}\ntrain the recipe vllm-nvfp4, or vllm-nvfp4-weight without activations, whose layers share it; nothing was written".format(
            "\n".join(lines)
        )
    )
