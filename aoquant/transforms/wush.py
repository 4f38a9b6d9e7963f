"""WUSH: a transform for each block of K, fitted to the activations and to the weights that meet there.

    G_W = W_b^T W_b / N,  G_X = mean of x_b^T x_b,  each plus .01 mean(diag) I;   L = chol(G_W);   L^T G_X L = U Lam U^T
    T = H Lam^(-1/4) U^T L^T,  rounded to bf16;   the weight side is the inverse of the rounded T

For these Grams T G_X T^T = T^-T G_W T^-1 = H Lam^(1/2) H^T: what is quantised has the same covariance on both sides,
and H spreads it evenly over the block. The damping is part of the definition. The order and the signs of eigenvectors
are free, so T itself is data: it is stored, in the layer's buffers and in the packed tensor, and never made again from
what it was fitted to.

P (K / G, G, G) is T for activations and T^-T for weights: inverted in float64, kept in float32. Products are summed in
float64 and rounded once to float32, so that the order in which a device adds shows in one value of many millions, if at
all, and other rows do not matter.

Source: Chen et al., "WUSH: Near-Optimal Adaptive Transforms for LLM Quantization" (2025).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .hadamard import butterflies
from .transform import Transform

DAMPING = 1e-2
CHUNK = 1 << 24  # values that are in float64 at a time
NEEDS_MATRIX = "{}: its matrices are found by calibration, and none were given"


@dataclass(frozen=True)
class WUSH(Transform):
    """A fitted transform of each block of `size` values: `aoquant.calibrate` finds its matrices."""

    fitted = True

    @property
    def name(self) -> str:
        return f"wush{self.size}"

    def apply(self, x_RK: Tensor, inverse: bool, matrix: Tensor | None) -> Tensor:
        return self._times(x_RK, None if matrix is None else matrix.mT)

    def pull_back(self, grad_RK: Tensor, inverse: bool, matrix: Tensor | None) -> Tensor:
        return self._times(grad_RK, matrix)

    def _times(self, x_RK: Tensor, matrix: Tensor | None) -> Tensor:
        if matrix is None:
            raise ValueError(NEEDS_MATRIX.format(self.name))
        wide, k = matrix.double(), x_RK.shape[1]
        parts = []
        for x in x_RK.split(max(1, CHUNK // k)):
            x_GRB = x.reshape(len(x), k // self.size, self.size).transpose(0, 1)
            parts.append((x_GRB.double() @ wide).float().transpose(0, 1).reshape(x.shape))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def gram(x_RK: Tensor, size: int) -> Tensor:
    """(K / size, size, size) float64: the sum over rows of x_b^T x_b, for each block b."""
    k = x_RK.shape[1]
    total = torch.zeros(k // size, size, size, dtype=torch.float64, device=x_RK.device)
    for x in x_RK.split(max(1, CHUNK // k)):
        x_GRB = x.double().reshape(len(x), k // size, size).transpose(0, 1)
        total += x_GRB.transpose(1, 2) @ x_GRB
    return total


def fit(gram_x: Tensor, gram_w: Tensor) -> tuple[Tensor, Tensor]:
    """(T, T^-T) float32 of the mean Grams (K / G, G, G) of activations and weights, without their damping; T has bf16
    entries.

    Raises:
        ValueError: a Gram is not finite or zero, or the two are so far apart that T has no numbers.
    """
    g_x, g_w = _damped(gram_x.double(), "input"), _damped(gram_w.double(), "weight")
    lower = torch.linalg.cholesky(g_w)
    values, vectors = torch.linalg.eigh(lower.mT @ g_x @ lower)
    size = g_x.shape[-1]
    sylvester = butterflies(torch.eye(size, dtype=g_x.dtype, device=g_x.device), size) / size**0.5
    fourth_roots = (values.clamp(min=torch.finfo(values.dtype).tiny) ** -0.25).diag_embed()
    t = (sylvester @ fourth_roots @ vectors.mT @ lower.mT).to(torch.bfloat16).double()
    inverse, info = torch.linalg.inv_ex(t)
    of_x, of_w = t.float(), inverse.mT.float()
    if bool(info.any()) or not all(bool(m.isfinite().all()) for m in (of_x, of_w)):
        raise ValueError(
            "its inputs and weights are too far apart for a fitted transform in bfloat16: leave the layer out, or use aoquant.Hadamard"
        )
    return of_x.contiguous(), of_w.contiguous()


def _damped(g: Tensor, what: str) -> Tensor:
    mean = g.diagonal(dim1=1, dim2=2).mean(1)
    if not bool(g.isfinite().all()):
        raise ValueError(f"its {what} holds NaN or Inf: look for it in the data or the weights")
    if bool((mean == 0).any()):
        size, block = g.shape[-1], int((mean == 0).nonzero()[0])
        raise ValueError(
            f"its {what} is zero throughout values {block * size} to {(block + 1) * size - 1} of K, and a transform of them cannot be fitted: "
            "run other batches, leave the layer out, or use aoquant.Hadamard"
        )
    return g + (DAMPING * mean).view(-1, 1, 1) * torch.eye(g.shape[-1], dtype=g.dtype, device=g.device)
