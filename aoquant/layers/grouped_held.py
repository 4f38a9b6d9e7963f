"""A grouped product under held weight scales: what `grouped.grouped_linear` computes, with each expert's own scales.

Experts hold scales when they go on from packed ones (`aoquant.unpack_`), whose codes scales made anew would not give.
It is a loop over the experts that have rows: each is one quantised linear layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from aoquant.formats import Scales
from aoquant.layers.linear import LinearRecipe, cast, quantized_linear


def grouped_held_linear(
    x_SK: Tensor,
    weight_of: Callable[[int], Tensor],
    scales_of: Callable[[int], Scales | None],
    ends: Sequence[int],
    n: int,
    recipe: LinearRecipe,
    random: Tensor | None = None,
    rank: int = 0,
) -> Tensor:
    """y (S, N) of x (S, K) whose rows are sorted by expert; arguments as `grouped_linear` has them.

    scales_of: the scales of an expert's weight.
    """
    outputs, start = list[Tensor](), 0
    for e, end in enumerate(ends):
        if end > start:
            held = scales_of(e)
            y = quantized_linear(x_SK[start:end], weight_of(e), None, recipe, w_held=held, random=random, rank=rank)
            outputs.append(y)
        start = end
    return torch.cat(outputs) if outputs else cast(x_SK).new_empty(0, n)
