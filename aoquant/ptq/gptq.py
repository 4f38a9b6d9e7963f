"""GPTQ: round a weight column by column, and let the columns that are left make up for each error.

For y = x W^T, inputs with the Gram matrix H = sum x^T x and a rounded weight Q the error is tr((W - Q) H (W - Q)^T).
With U the upper Cholesky factor of (H + damping)^-1, columns in the order of falling H_jj:

    q_j = nearest value that a code stands for;  e_j = (w_j - q_j) / U_jj;  w_i -= e_j U_ji for all i > j

Scales are those of the original weight, or of `clip.py`, and stay ("static groups"), so any format's codes can be
chosen in any order.
The loop is `ops/columns.py`. The asymmetric target makes up for errors of earlier layers, too: their outputs x differ
from the float model's x', and W* = W C (H + damping)^-1 with C = sum x'^T x is the weight that gives x' W^T from x, as
closely as a linear layer can. Codes are chosen for a weight that is a share of the way from W to W* (GPTAQ's alpha):
noise in x makes the weight of a regression too small, most of all the noise of 4-bit activations.

Sources: Frantar et al. 2022 (GPTQ); Li et al. 2025 (GPTAQ) and Zhang et al. 2025 (Qronos) for the target.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aoquant.formats import Encoded, Format, Operand, tiles
from aoquant.formats.levels import Levels, packed
from aoquant.ops.columns import round_columns

ESCALATION = (1.0, 10.0, 100.0)  # times the damping that was asked for
TABLE_BYTES = 1 << 27  # of the levels that exist at once
LEAF = 1024  # rows of a matrix that LAPACK or cuSOLVER factorises whole
STRIP = 512  # rows or columns of a product that exist at a time
TOWARDS_FLOAT, TOWARDS_FLOAT_ROUNDED = 0.75, 0.5  # of the way to W*; the latter where inputs are rounded, too
DECODED = 1 << 22  # values that are decoded at a time: on a GPU fused multiply-adds take ten float32 matrices


@dataclass(frozen=True)
class Factor:
    """The inverse of a damped Gram matrix, and how it was found.

    lower_KK: V, lower triangular, float64: V^T V is the inverse for the columns in the opposite of the order.
    order_K: columns, first come first rounded. damping: a share of the mean of H's diagonal, which was added to it.
    """

    lower_KK: Tensor
    order_K: Tensor
    damping: float

    def write_upper(self, gram_KK: Tensor) -> Tensor:
        """Write U, float32, from the diagonal of H on, and return H's diagonal: U^T U is the inverse for the columns in
        order, and H is symmetric. So both take the memory of one.
        """
        diagonal_K, k = gram_KK.diagonal().clone(), len(gram_KK)
        for start in range(0, k, STRIP):
            stop = min(start + STRIP, k)
            u = self.lower_KK[k - stop : k - start, : k - start].flip(0, 1)
            gram_KK[start:stop, stop:] = u[:, stop - start :]
            own = gram_KK[start:stop, start:stop]
            own.tril_(-1).add_(u[:, : stop - start].triu())
        return diagonal_K

    def solve_(self, moved_NK: Tensor) -> Tensor:
        """Write moved_NK (H + damping)^-1 in the place of moved_NK, computed in float64, and return it."""
        backwards = self.order_K.flip(0)
        forwards = backwards.argsort()
        for some in moved_NK.split(STRIP):
            some.copy_((some[:, backwards].double() @ self.lower_KK.mT @ self.lower_KK)[:, forwards])
        return moved_NK


@dataclass(frozen=True)
class Weight:
    """A weight to round. target_NK: float32, what errors are measured against: the original weight, or the one that
    `towards_float` returns. encoded: its scales stay. gram_KK, diagonal_K: H below its diagonal and U, and H's
    diagonal, as `Factor.write_upper` leaves them. order_K: of the factor.
    """

    target_NK: Tensor
    encoded: Encoded
    gram_KK: Tensor
    diagonal_K: Tensor
    order_K: Tensor


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
    mean = float(diagonal.double().mean())
    for times in ESCALATION:
        h_KK = gram_KK.new_empty(k, k, dtype=torch.float64)
        for some, into in zip(backwards.split(STRIP), h_KK.split(STRIP), strict=True):
            into.copy_(gram_KK[some][:, backwards])
        own = h_KK.diagonal()
        own.masked_fill_(own == 0, 1.0).add_(damping * times * mean)
        if _invert_factor(h_KK) and all(some.isfinite().all() for some in h_KK.split(STRIP)):
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
    for some in b.split(STRIP):
        some.copy_(some @ a.mT)
    c.addmm_(b, b.mT, alpha=-1.0)
    if not _invert_factor(c):
        return False
    for some in b.split(STRIP):
        some.copy_(some @ a)
    for some in b.split(STRIP, dim=1):
        some.copy_(c @ some).neg_()
    h_KK[:m, m:] = 0.0
    return True


def ahead(w_NK: Tensor, ahead_KK: Tensor) -> Tensor:
    """Return W (C - H) (N, K) float32, which `towards_float` needs. ahead_KK: C - H, float32."""
    moved_NK = w_NK.new_empty(w_NK.shape, dtype=torch.float32)
    for ahead_KS, into_NS in zip(ahead_KK.split(STRIP, dim=1), moved_NK.split(STRIP, dim=1), strict=True):
        into_NS.copy_(w_NK.double() @ ahead_KS.double())
    return moved_NK


def towards_float(w_NK: Tensor, moved_NK: Tensor, f: Factor, operand: Operand | None) -> Tensor:
    """Return a weight (N, K), float32, on the way to W*, which gives the float model's outputs from the quantised
    model's inputs as closely as a linear layer can.

    moved_NK: of `ahead`, overwritten. operand: how the layer rounds its input.
    """
    rounded = operand is not None and not operand.format.lossless
    return f.solve_(moved_NK).mul_(TOWARDS_FLOAT_ROUNDED if rounded else TOWARDS_FLOAT).add_(w_NK)


def choose_codes(weights: Sequence[Weight], format: Format, dtype: torch.dtype) -> list[tuple[Encoded, float]]:
    """Choose the codes of weights of one shape under the scales that they have, and return them with their squared
    error of the output over the output's square. dtype: that values are decoded in.

    On a GPU as many as TABLE_BYTES allow are rounded at once.
    """
    n, k = weights[0].target_NK.shape
    step = max(1, TABLE_BYTES // (5 * (k // (format.block or k)) << format.bits))
    step = -(-step // format.tile_rows) * format.tile_rows
    found, together = [], max(1, step // n)
    for i in range(0, len(weights), together):
        some = weights[i : i + together]
        upper_EKK = torch.stack([w.gram_KK for w in some]) if len(some) > 1 else some[0].gram_KK[None]
        parts = [
            _rounded(some, upper_EKK, slice(first, min(first + step, n)), format, dtype) for first in range(0, n, step)
        ]
        del upper_EKK
        for w, *made in zip(some, *parts, strict=True):
            values_NK, codes_NK = (torch.cat(halves) for halves in zip(*made, strict=True))
            error = missed(w.target_NK, w.gram_KK, w.diagonal_K, values_NK)
            found.append((packed(format, w.encoded, codes_NK), error))
    return found


def _rounded(
    weights: Sequence[Weight], upper_EKK: Tensor, some: slice, format: Format, dtype: torch.dtype
) -> list[tuple[Tensor, Tensor]]:
    """Return (values, codes) of some rows of each weight, (N, K) each."""
    levels = Levels.cat([Levels.of(format, e, dtype) for w in weights for _, e in _cut(format, w.encoded, some)])
    orders = [w.order_K for w in weights]
    left_EKN = torch.stack([w.target_NK[some].t()[order] for w, order in zip(weights, orders, strict=True)])
    made = zip(orders, *round_columns(left_EKN, upper_EKK, torch.stack(orders), levels), strict=True)
    found = []
    for order, values_KN, codes_KN in made:
        back = order.argsort()
        found.append((values_KN[back].t().contiguous(), codes_KN[back].t().contiguous()))
    return found


def decoded(format: Format, e: Encoded, dtype: torch.dtype) -> Tensor:
    """Return what e stands for in `dtype`, as float32 (N, K)."""
    made_NK = torch.empty(len(e.codes), e.k, dtype=torch.float32, device=e.codes.device)
    for at, some in _cut(format, e, slice(0, len(e.codes))):
        made_NK[at] = format.decode(some, dtype)
    return made_NK


def _cut(format: Format, e: Encoded, some: slice) -> Iterator[tuple[slice, Encoded]]:
    """Yield some rows of e, as many at a time as are decoded at once."""
    step = max(1, DECODED // (e.k * format.tile_rows)) * format.tile_rows
    for first in range(some.start, some.stop, step):
        at = slice(first, min(first + step, some.stop))
        yield at, tiles.rows_of(format, e, at)


def _energy(d_NK: Tensor, gram_KK: Tensor, diagonal_K: Tensor) -> float:
    """Return tr(d H d^T), the square of x d^T. Of gram_KK the columns below the diagonal are read."""
    total = torch.zeros((), dtype=torch.float64, device=d_NK.device)
    for start in range(0, len(gram_KK), STRIP):
        stop = start + STRIP
        own = gram_KK[start:stop, start:stop].tril(-1)
        own = own + own.mT + diagonal_K[start:stop].diag()
        d_NS = d_NK[:, start:stop]
        moved_NS = (d_NK[:, stop:] @ gram_KK[stop:, start:stop]).mul_(2.0).addmm_(d_NS, own)
        total += moved_NS.mul_(d_NS).sum(dtype=torch.float64)
    return float(total)


def missed(target_NK: Tensor, gram_KK: Tensor, diagonal_K: Tensor, found_NK: Tensor) -> float:
    """Return the squared error of x Q^T over the square of x W^T, from the Gram matrix of x: gram_KK below its
    diagonal, and diagonal_K. found_NK: Q.
    """
    square = max(_energy(target_NK, gram_KK, diagonal_K), 1e-300)
    return _energy(target_NK - found_NK, gram_KK, diagonal_K) / square
