"""Weights that an engine keeps as one and a model as several, such as q, k and v, joined as their rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aoquant.linear.tensor import PackedTensor

_PARTS = (*PackedTensor.tensor_data_names, *PackedTensor.optional_tensor_data_names)


def joined_rows(parts: Sequence[PackedTensor]) -> PackedTensor:
    """The weight whose rows are those of `parts`, in order; codes and scales are copied.

    Raises:
        ValueError: they differ in format, activations, contract, columns or dtype, or have scales of their own for all
            of their rows.
    """
    first = parts[0]
    facts = [(p.format, p.activation, p.contract, p.k, p.dtype) for p in parts]
    if wrong := [fact for fact in facts if fact != facts[0]]:
        raise ValueError(f"rows of one weight are quantised as {facts[0]} and as {wrong[0]}")
    joined = list[Tensor | None]()
    for pieces in zip(*([getattr(p, name) for name in _PARTS] for p in parts), strict=True):
        given = [t for t in pieces if t is not None]
        if len(given) < len(pieces) or all(len(t) == len(p) for t, p in zip(given, parts, strict=True)):
            joined.append(torch.cat(given) if given else None)
        elif all(torch.equal(t, given[0]) for t in given) and len(given[0]) == 1:
            joined.append(given[0])
        elif first.weight_format.tile_rows > 1 and not any(len(p) % first.weight_format.tile_rows for p in parts):
            joined.append(torch.cat(given))
        else:
            raise ValueError(f"rows of one weight have a scale ({first.format}) for each of {len(parts)} parts")
    return first._with(joined)
