"""Gram matrices of what layers multiply their weights by.

A layer multiplies its weight by its input after the transform and, where activations are quantised, after rounding. So
the Gram matrix is that of the deployed input. On a GPU its operands are rounded to bfloat16 and summed in float32.
"""

import torch
from torch import Tensor

from aoquant.formats import Scales
from aoquant.linear.checks import cast, check_width
from aoquant.linear.prepared import QATLinear
from aoquant.linear.recipe import LinearRecipe

STRIP = 2048  # rows of a Gram matrix that are added to at a time
ALL_PADDING = "all tokens that reached it are padding: give batches whose attention_mask has ones"
NOT_FINITE = "its input holds NaN or Inf: look for it in the batches or in the weights before the layer"


class InputGram:
    """H = sum x^T x / rows (K, K) float32 and, for the asymmetric target, C - H with C = sum x'^T x / rows."""

    def __init__(self, k: int, device: torch.device, *, cross: bool) -> None:
        self.total_KK = torch.zeros(k, k, dtype=torch.float32, device=device)
        self.ahead_KK = torch.zeros_like(self.total_KK) if cross else None
        self.rows = 0

    def add(self, x_MK: Tensor | None, float_MK: Tensor | None) -> None:
        """Add rows of the quantised model, if there are any, and the same rows of the float model."""
        if x_MK is None:
            return
        operand = torch.bfloat16 if x_MK.is_cuda else torch.float32
        x = x_MK.to(operand)
        ahead = None if self.ahead_KK is None or float_MK is None else float_MK.to(operand)
        for start in range(0, x.shape[1], STRIP):
            strip = slice(start, start + STRIP)
            # what is right of the diagonal follows by symmetry
            _add_product(self.total_KK[strip, : strip.stop], x[:, strip], x[:, : strip.stop])
            if self.ahead_KK is not None:
                assert ahead is not None
                _add_product(self.ahead_KK[strip], ahead[:, strip], x)
        self.rows += len(x_MK)

    def mean(self) -> tuple[Tensor, Tensor | None]:
        """Return (H, C - H) of a row, or None for the second; its own memory, so that no more rows can be added.

        Raises:
            ValueError: no row was seen, or one holds NaN or Inf.
        """
        if self.rows == 0:
            raise ValueError(ALL_PADDING)
        h_KK = self.total_KK.div_(self.rows)
        for start in range(0, len(h_KK), STRIP):
            strip = slice(start, start + STRIP)
            h_KK[: strip.start, strip] = h_KK[strip, : strip.start].mT
            if not h_KK[strip, : strip.stop].isfinite().all():
                raise ValueError(NOT_FINITE)
        return h_KK, None if self.ahead_KK is None else self.ahead_KK.div_(self.rows).sub_(h_KK)


def _add_product(total: Tensor, a_MI: Tensor, b_MJ: Tensor) -> None:
    if total.is_cuda:
        total += torch.mm(a_MI.t(), b_MJ, out_dtype=torch.float32)
    else:
        total.addmm_(a_MI.t(), b_MJ)


def multiplied(layer: QATLinear, x: Tensor, mask: Tensor | None, *, rounded: bool = True) -> Tensor:
    """Return (rows, K): what the layer multiplies its weight by, of the tokens that are no padding.

    rounded: as it is deployed; False stops behind the transform.
    """
    check_width(x, layer.matrix().shape[1])
    x_MK = deployed_input(layer.prepared.recipe, layer.held_scales("input"), cast(x), rounded=rounded)
    return of_tokens(x_MK.view(*x.shape[:-1], -1), mask)


def of_tokens(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return (rows, K): rows of x (..., K) of the tokens that `mask` counts; all where it is of other tokens."""
    x_MK = x.reshape(-1, x.shape[-1])
    return x_MK if mask is None or mask.shape != x.shape[:-1] else x_MK[mask.flatten().to(x.device)]


def deployed_input(recipe: LinearRecipe, held: Scales | None, x: Tensor, *, rounded: bool = True) -> Tensor:
    """Return (rows, K): what a recipe multiplies a weight by, for x (..., K). rounded: as for `multiplied`."""
    x_MK, operand = x.reshape(-1, x.shape[-1]), recipe.fprop_input
    if operand is None:
        return x_MK
    if rounded and not operand.format.lossless:
        return operand.decode(operand.encode(x_MK, held), torch.float32)
    return operand.transformed(x_MK, None if held is None else held.transform)
