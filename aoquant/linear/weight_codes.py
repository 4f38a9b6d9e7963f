"""Codes that stand for a weight: what all-gathers and `quantized_model_init` hold in its place."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from aoquant.distributed import shards
from aoquant.formats import Encoded, Operand, Scales
from aoquant.formats.random import Place, Span
from aoquant.linear.recipe import LinearRecipe
from aoquant.ops import backward, codec


def reads_values(recipe: LinearRecipe) -> str | None:
    """Return why a layer with this recipe needs the weight itself, and not its codes alone; None when it does not."""
    gemm = recipe.dgrad
    if recipe.holds and not recipe.history:
        return "the layer encodes its weight by scales or a transform that it holds (static, learned or fitted)"
    if recipe.weight_clips:
        return "straight_through='clipped' masks gradients by the weight itself"
    if recipe.fprop_weight.format.lossless:
        return "its forward does not quantise the weight"
    if gemm.keeps == "values" and gemm.forward is None and (gemm.other is None or gemm.other.draws):
        return "dgrad starts from the weight itself"
    return None


class Sides(NamedTuple):
    """Codes of a weight, or of some of its rows: of W, and of W^T where dgrad reads them. Experts have E in front."""

    rows: Encoded
    columns: Encoded | None


def encoded_sides(
    recipe: LinearRecipe, w: Tensor, groups: Sequence[dist.ProcessGroup] = (), held: Scales | None = None
) -> Sides | None:
    """Return the sides of w (N, K), None if it has no rows. groups: of ranks that have other rows of the weight. held:
    delayed scales of w.
    """
    weight_as, gemm = recipe.fprop_weight, recipe.dgrad

    def reduced(operand: Operand, values: Tensor) -> Scales | None:
        return shards.scales(operand, values, (), groups)

    if held is None:
        held = reduced(weight_as, weight_as.transformed(w) if w.numel() else w)
    columns = None
    if gemm.keeps == "values" and gemm.forward is None:
        assert gemm.other is not None
        nowhere = Place(Span(0, 0), Span(0, 0))  # nothing of it is drawn
        columns = backward.columns(w, gemm.other, gemm.multiple, backward.Part(nowhere, reduced))
    if not w.numel():
        return None
    return Sides(codec.encode(weight_as, w) if held is None else weight_as.encode(w, held), columns)


def encoded_experts(recipe: LinearRecipe, w_ENK: Tensor) -> Sides | None:
    """Return the sides of experts, each encoded by itself; None of no expert."""
    sides = [s for w in w_ENK if (s := encoded_sides(recipe, w.contiguous())) is not None]
    if not sides:
        return None
    columns = [s.columns for s in sides if s.columns is not None]
    rows = Encoded.joined([s.rows for s in sides], torch.stack)
    return Sides(rows, Encoded.joined(columns, torch.stack) if columns else None)
