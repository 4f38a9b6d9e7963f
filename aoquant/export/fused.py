"""The checks at export of layers that engines fuse: they share their outer scale (`planning/fused.py` says why), and
one scheme, because the engine makes one layer of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from aoquant.integrations.checkpoint import some
from aoquant.planning.fused import siblings


def unequal(outer: Mapping[str, Tensor]) -> list[list[str]]:
    """The groups of siblings whose outer scales, given by module, differ. outer: one number each, for every row or
    once.
    """
    first = {name: scale.flatten()[:1] for name, scale in outer.items()}
    return [group for group in siblings(first) if not all(torch.equal(first[group[0]], first[n]) for n in group)]


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
        "\n".join(lines) + "\n"
        "train the recipe vllm-nvfp4, or vllm-nvfp4-weight without activations, whose layers share it; "
        "nothing was written"
    )


def warn_mixed(linears: Iterable[str], schemes: Mapping[str, Any]) -> None:
    """Warn of siblings with different schemes. linears: every one, by name. schemes: of the quantised ones."""
    mixed = []
    for group in siblings(dict.fromkeys((*linears, *schemes))):
        if len({str(schemes.get(name)) for name in group}) > 1:
            parent = group[0].rpartition(".")[0]
            mixed.append(f"{parent}.{{{', '.join(name.rpartition('.')[2] for name in group)}}}")
    if mixed:
        warnings.warn(
            f"vLLM fuses q, k, v and gate, up into one layer each, and refuses different schemes in one, as in {some(mixed)}: quantise "
            "them alike, or skip all of them; transformers reads the folder",
            stacklevel=4,
        )
