"""GPTQ: round a weight column by column, and let the columns that are left make up for each error.

For y = x W^T, inputs with the Gram matrix H = sum x^T x and a rounded weight Q the error is tr((W - Q) H (W - Q)^T).
With U the upper Cholesky factor of (H + damping)^-1, columns in the order of falling H_jj:

    q_j = nearest value that a code stands for;  e_j = (w_j - q_j) / U_jj;  w_i -= e_j U_ji for all i > j

Scales are those of the original weight and stay ("static groups"), so any format's codes can be chosen in any order.
The loop is `ops/columns.py`. The asymmetric target makes up for errors of earlier layers, too: their outputs x differ
from the float model's x', and W* = W C (H + damping)^-1 with C = sum x'^T x is the weight that gives x' W^T from x, as
closely as a linear layer can.

Sources: Frantar et al. 2022 (GPTQ); Li et al. 2025 (GPTAQ) and Zhang et al. 2025 (Qronos) for the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aoquant.formats import Encoded, Format
from aoquant.formats.columns import Levels, packed, rows
from aoquant.ops.columns import round_columns

ESCALATION = (1.0, 10.0, 100.0)  # times the damping that was asked for
TABLE_BYTES = 1 << 28  # of the levels that exist at once
LEAF = 1024  # rows of a matrix that LAPACK or cuSOLVER factorises whole
STRIP = 1024  # rows that are copied at a time


@dataclass(frozen=True)
class Factor:
    """The inverse of a damped Gram matrix, and how it was found.

    lower_KK: V, lower triangular, float64: V^T V is the inverse for the columns in the opposite of the order.
    order_K: columns, first come first rounded. damping: a share of the mean of H's diagonal, which was added to it.
    """

    lower_KK: Tensor
    order_K: Tensor
    damping: float

    @property
    def upper_KK(self) -> Tensor:
        """Return U, float32: U^T U is the inverse for the columns in order."""
        return self.lower_KK.float().flip(0, 1)

    def solve(self, moved_NK: Tensor) -> Tensor:
        """Return moved_NK (H + damping)^-1, float64."""
        backwards = self.order_K.flip(0)
        return (moved_NK[:, backwards] @ self.lower_KK.mT @ self.lower_KK)[:, backwards.argsort()]


@dataclass(frozen=True)
class Weight:
    """A weight to round. target_NK: float32, what errors are measured against: the weight that `encoded` encodes, or
    W*. encoded: its scales stay. gram_KK: H.
    """

    target_NK: Tensor
    encoded: Encoded
    gram_KK: Tensor
    factor: Factor


@dataclass(frozen=True)
class Chosen:
    """Codes of one weight. error, nearest: squared error of the output over the output's square, of these codes and of
    rounding to the nearest.
    """

    encoded: Encoded
    error: float
    nearest: float


def factor(gram_KK: Tensor, damping: float, act_order: bool) -> Factor:
    """Factorise a Gram matrix in float64, with more damping where less is not enough.

    Columns whose inputs were always zero get no error from others and give none.

    Raises:
        ValueError: no damping makes the matrix positive definite.
    """
    diagonal = gram_KK.diagonal()
    k = len(diagonal)
    order = diagonal.argsort(descending=True, stable=True) if act_order else torch.arange(k, device=gram_KK.device)
    backwards = order.flip(0)
    mean = float(diagonal.double().mean()) or 1.0
    for times in ESCALATION:
        h_KK = gram_KK.new_empty(k, k, dtype=torch.float64)
        for some, into in zip(backwards.split(STRIP), h_KK.split(STRIP), strict=True):
            into.copy_(gram_KK[some][:, backwards])
        own = h_KK.diagonal()
        own.masked_fill_(own == 0, 1.0).add_(damping * times * mean)
        if _invert_factor(h_KK) and h_KK.isfinite().all():
            return Factor(h_KK, order, damping * times)
        del h_KK
    raise ValueError(
        f"the Gram matrix of its input is not positive definite, even with damping {damping * ESCALATION[-1]}: calibrate "
        "on more tokens, or leave the layer out"
    )


def _invert_factor(h_KK: Tensor) -> bool:
    """Write the inverse of a matrix's lower Cholesky factor in its place, by halves; return whether it has one.

    A matrix of 14336 columns takes 1.6 GB in float64, so copies of it would be most of what calibration needs.
    """
    k = len(h_KK)
    if k <= LEAF:
        lower, failed = torch.linalg.cholesky_ex(h_KK)
        eye = torch.eye(k, dtype=h_KK.dtype, device=h_KK.device)
        h_KK.copy_(torch.linalg.solve_triangular(lower, eye, upper=False))
        return not failed
    m = k // 2
    a, b, c = h_KK[:m, :m], h_KK[m:, :m], h_KK[m:, m:]
    if not _invert_factor(a):
        return False
    b.copy_(b @ a.mT)
    c.addmm_(b, b.mT, alpha=-1.0)
    if not _invert_factor(c):
        return False
    b.copy_(c @ (b @ a)).neg_()
    h_KK[:m, m:] = 0.0
    return True


def towards_float(w_NK: Tensor, ahead_KK: Tensor, f: Factor) -> Tensor:
    """Return W* (N, K) float32: the weight that gives the float model's outputs from the quantised model's inputs.

    ahead_KK: C - H, float32.
    """
    return w_NK + f.solve(w_NK.double() @ ahead_KK.double()).float()


def choose_codes(weights: Sequence[Weight], format: Format, dtype: torch.dtype) -> list[Chosen]:
    """Choose the codes of weights of one shape under the scales that they have. dtype: that values are decoded in.

    On a GPU as many as TABLE_BYTES allow are rounded at once.
    """
    n, k = weights[0].target_NK.shape
    step = max(1, TABLE_BYTES // (5 * (k // (format.block or k)) << format.bits))
    step = -(-step // format.tile_rows) * format.tile_rows
    found, together = [], max(1, step // n)
    for i in range(0, len(weights), together):
        some = weights[i : i + together]
        upper_EKK = torch.stack([w.factor.upper_KK for w in some])
        parts = [
            _rounded(some, upper_EKK, slice(first, min(first + step, n)), format, dtype) for first in range(0, n, step)
        ]
        del upper_EKK
        for w, *made in zip(some, *parts, strict=True):
            values_NK, codes_NK = (torch.cat(halves) for halves in zip(*made, strict=True))
            nearest, error = missed(w.target_NK, w.gram_KK, format.decode(w.encoded, dtype).float(), values_NK)
            found.append(Chosen(packed(format, w.encoded, codes_NK), error, nearest))
    return found


def _rounded(
    weights: Sequence[Weight], upper_EKK: Tensor, some: slice, format: Format, dtype: torch.dtype
) -> list[tuple[Tensor, Tensor]]:
    """Return (values, codes) of some rows of each weight, (N, K) each."""
    cut = (rows(w.encoded, some.start, some.stop, format.tile_rows) for w in weights)
    levels = Levels.cat([Levels.of(format, e, dtype) for e in cut])
    orders = [w.factor.order_K for w in weights]
    left_EKN = torch.stack([w.target_NK[some].t()[order] for w, order in zip(weights, orders, strict=True)])
    made = zip(orders, *round_columns(left_EKN, upper_EKK, torch.stack(orders), levels), strict=True)
    found = []
    for order, values_KN, codes_KN in made:
        back = order.argsort()
        found.append((values_KN[back].t().contiguous(), codes_KN[back].t().contiguous()))
    return found


def _energy(d_NK: Tensor, gram_KK: Tensor) -> float:
    """Return tr(d H d^T), the square of x d^T."""
    return float(((d_NK @ gram_KK) * d_NK).sum(dtype=torch.float64))


def missed(target_NK: Tensor, gram_KK: Tensor, *found_NK: Tensor) -> list[float]:
    """Return the squared error of x Q^T over the square of x W^T for each Q, from the Gram matrix of x."""
    square = max(_energy(target_NK, gram_KK), 1e-300)
    return [_energy(target_NK - q_NK, gram_KK) / square for q_NK in found_NK]
