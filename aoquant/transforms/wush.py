"""WUSH: a transform for each block of K, fitted to the activations and to the weights that meet there.

    G_W = W_b^T W_b / N,  G_X = mean of x_b^T x_b,  each plus .01 mean(diag) I;   L = chol(G_W);   L^T G_X L = U Lam U^T
    T = H Lam^(-1/4) U^T L^T,  rounded to bf16;   the weight side is the inverse of the rounded T

For these Grams T G_X T^T = T^-T G_W T^-1 = H Lam^(1/2) H^T: what is quantised has the same variance on both sides, and H spreads it
evenly over the block. The damping is part of the definition. The order and the signs of eigenvectors are free, so T itself is data:
it is stored, in the layer's buffers and in the packed tensor, and never made again from what it was fitted to.

P (K / G, G, G) is T for activations and T^-T for weights. Products are summed in float64 and rounded once to float32: whatever order a
device adds them in, the result is the float32 nearest to the sum but for one value in millions, and never depends on the other rows.

Source: "WUSH: Near-Optimal Adaptive Transforms for LLM Quantization" (2025).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Transform

NEEDS_MATRIX = "{}: its matrices are found by calibration, and none were given"


@dataclass(frozen=True)
class WUSH(Transform):
    """A fitted transform of each block of `size` values."""

    @property
    def name(self) -> str:
        return f"wush{self.size}"

    @property
    def sided(self) -> bool:
        return False  # the matrix that is given is its side's

    @property
    def fitted(self) -> bool:
        return True

    def apply(self, x_RK: Tensor, inverse: bool, matrix: Tensor | None) -> Tensor:
        return self._times(x_RK, matrix, "rgi,goi->rgo")

    def pull_back(self, grad_RK: Tensor, inverse: bool, matrix: Tensor | None) -> Tensor:
        return self._times(grad_RK, matrix, "rgi,gio->rgo")

    def _times(self, x_RK: Tensor, matrix: Tensor | None, equation: str) -> Tensor:
        if matrix is None:
            raise ValueError(NEEDS_MATRIX.format(self.name))
        x_RGB = x_RK.reshape(x_RK.shape[0], x_RK.shape[1] // self.size, self.size)
        return torch.einsum(equation, x_RGB.double(), matrix.double()).float().reshape(x_RK.shape)
