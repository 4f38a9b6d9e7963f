"""GPTQ: round a weight column by column, and let the columns that are left make up for each error.

For y = x W^T, inputs with the Gram matrix H = sum x^T x and a rounded weight Q the error is tr((W - Q) H (W - Q)^T).
With U the upper Cholesky factor of (H + damping)^-1, columns in the order of falling H_jj:

    q_j = nearest value that a code stands for;  e_j = (w_j - q_j) / U_jj;  w_i -= e_j U_ji for all i > j

Scales are those of the original weight and stay ("static groups"), so any format's codes can be chosen in any order.
Updates of columns beyond a block of 128 are one GEMM. The asymmetric target makes up for errors of earlier layers, too:
their outputs x differ from the float model's x', and W* = W C (H + damping)^-1 with C = sum x'^T x is the weight that
gives x' W^T from x, as closely as a linear layer can.

Sources: Frantar et al. 2022 (GPTQ); Li et al. 2025 (GPTAQ) and Zhang et al. 2025 (Qronos) for the target.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aoquant.formats import Encoded, Format
from aoquant.formats.columns import Levels, packed, rows

BLOCK = 128
ESCALATION = (1.0, 10.0, 100.0)  # times the damping that was asked for
TABLE_BYTES = 1 << 30  # of the levels that exist at once


@dataclass(frozen=True)
class Factor:
    """U of a Gram matrix (K, K), and how it was found. order: columns, first come first rounded. damping: a share of
    the mean of H's diagonal, which was added to it.
    """

    upper_KK: Tensor
    order_K: Tensor
    damping: float


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
    h_KK = gram_KK[order][:, order].double()
    own = h_KK.diagonal()
    own.masked_fill_(own == 0, 1.0)
    mean = float(diagonal.double().mean()) or 1.0
    for times in ESCALATION:
        damped = h_KK.clone()
        damped.diagonal().add_(damping * times * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if not failed and upper.isfinite().all():
            return Factor(upper.float(), order, damping * times)
    raise ValueError(
        f"the Gram matrix of its input is not positive definite, even with damping {damping * ESCALATION[-1]}: calibrate "
        "on more tokens, or leave the layer out"
    )


def towards_float(w_NK: Tensor, gram_KK: Tensor, cross_KK: Tensor, damping: float) -> Tensor:
    """Return W* (N, K) float32: the weight that gives the float model's outputs from the quantised model's inputs.

    cross_KK: C, sum of x'^T x over x' of the float and x of the quantised model.
    """
    damped = gram_KK.double()
    damped.diagonal().add_(damping * damped.diagonal().mean())
    moved = w_NK.double() @ (cross_KK.double() - gram_KK.double())
    return w_NK + torch.linalg.solve(damped, moved, left=False).float()


def choose_codes(
    target_NK: Tensor, e: Encoded, format: Format, dtype: torch.dtype, gram_KK: Tensor, f: Factor
) -> Chosen:
    """Choose the codes of a weight under the scales that `e` has.

    target_NK: float32, what is rounded and what errors are measured against: the weight that e encodes, or W*. dtype:
        that values are decoded in.
    """
    n, k = target_NK.shape
    step = max(1, TABLE_BYTES // (9 * (k // (format.block or k)) << format.bits))
    step = -(-step // format.tile_rows) * format.tile_rows
    codes, values = [], []
    for first in range(0, n, step):
        last = min(first + step, n)
        levels = Levels.of(format, rows(e, first, last, format.tile_rows), dtype)
        chosen, code = _rounded(target_NK[first:last], levels, f)
        values.append(chosen)
        codes.append(code)
    made = packed(format, e, torch.cat(codes))
    nearest = _error(target_NK, format.decode(e, dtype).float(), gram_KK)
    return Chosen(made, _error(target_NK, torch.cat(values), gram_KK), nearest)


def _rounded(w_NK: Tensor, levels: Levels, f: Factor) -> tuple[Tensor, Tensor]:
    """Return (values, codes) of some rows, (N, K) each."""
    order = f.order_K.tolist()
    left_KN = w_NK.t()[f.order_K].contiguous()  # a column of W is contiguous
    values_KN = torch.empty_like(left_KN)
    codes_KN = torch.empty_like(left_KN, dtype=torch.uint8)
    for start in range(0, len(order), BLOCK):
        end = min(start + BLOCK, len(order))
        u_BB = f.upper_KK[start:end, start:end]
        over = u_BB.diagonal().tolist()
        block_BN = left_KN[start:end]
        errors_BN = torch.empty_like(block_BN)
        for i in range(end - start):
            values_KN[start + i], codes_KN[start + i] = levels.nearest(block_BN[i], order[start + i])
            error = torch.sub(block_BN[i], values_KN[start + i], out=errors_BN[i]).div_(over[i])
            block_BN[i + 1 :].addr_(u_BB[i, i + 1 :], error, alpha=-1.0)
        left_KN[end:].addmm_(f.upper_KK[start:end, end:].t(), errors_BN, alpha=-1.0)
    back = f.order_K.argsort()
    return values_KN[back].t().contiguous(), codes_KN[back].t().contiguous()


def _error(w_NK: Tensor, q_NK: Tensor, gram_KK: Tensor) -> float:
    """Return the squared error of x Q^T over x W^T's square, from the Gram matrix of x."""
    h, d = gram_KK.float(), w_NK - q_NK
    return float(((d @ h) * d).sum().double() / ((w_NK @ h) * w_NK).sum().double().clamp(min=1e-300))
