"""The check at export that layers which engines fuse share their outer scale (`planning/fused.py` says why)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from aoquant.planning.fused import siblings


def check_fused(outer: Mapping[str, Tensor]) -> None:
    """Raise ValueError for siblings with different outer scales, given by module."""
    for group in siblings(outer):
        first = outer[group[0]]
        if not all(torch.equal(first.reshape(-1), outer[name].reshape(-1)) for name in group):
            scales = ", ".join(f"{name.rpartition('.')[2]} {outer[name].flatten()[0].item():.6g}" for name in group)
            raise ValueError(
                f"{group[0].rpartition('.')[0]}: an engine fuses these layers under one outer scale, and theirs differ ({scales}): train "
                "the recipe vllm-nvfp4, whose layers share it; nothing was written"
            )
