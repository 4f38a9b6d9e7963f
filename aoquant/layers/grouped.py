"""A grouped product: rows sorted by expert, times the weight of each expert.

    y[start_e : end_e] = x[start_e : end_e] W_e^T

This function is the only place where prepared and packed experts multiply, so prepared and converted experts agree bit
for bit. It is a loop: each expert that was hit is one quantised linear layer, with the forward, backward, checks and
kernels of `linear.quantized_linear`. An expert without rows costs nothing and gets no gradient from here. A kernel that
takes all experts in one launch belongs behind this signature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from aoquant.formats import Encoded
from aoquant.layers.linear import LinearRecipe, cast, quantized_linear


def grouped_linear(
    x_SK: Tensor,
    weight_of: Callable[[int], Tensor | Encoded],
    ends: Sequence[int],
    n: int,
    recipe: LinearRecipe,
    random: Tensor | None = None,
    rank: int = 0,
) -> Tensor:
    """y (S, N) of x (S, K) whose rows are sorted by expert.

    weight_of: an expert's weight (N, K), or its codes; asked for experts that have rows. ends: for each expert, the row
    after its last; the last of them is S. n: N. random: the state of the experts' random numbers, where backward draws;
    each expert advances it by one. rank: among those with other tokens.

    Raises:
        ValueError: as `quantized_linear`.
    """
    outputs, start = list[Tensor](), 0
    for expert, end in enumerate(ends):
        if end > start:
            outputs.append(quantized_linear(x_SK[start:end], weight_of(expert), None, recipe, random=random, rank=rank))
        start = end
    return torch.cat(outputs) if outputs else cast(x_SK).new_empty(0, n)
