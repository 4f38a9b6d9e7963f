"""The epilogue of the "aoquant" contract: rn(acc * alpha_x * alpha_w + bias), in the reference's order, each step in
float32.

GEMMs that end in it call `finished`, for a part of one row of y, or `finished_tile`. alpha_x and alpha_w are one number
(stride 0) or one a row of x and of W (stride 1), float32; the compiler leaves out those that are None.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import LAUNCHES, Launch

_B = 2048  # outputs of a program


@triton.jit
def finished(y, row, column, inside, alpha_x_ptr, alpha_w_ptr, bias_ptr, X_STRIDE, W_STRIDE):
    """(B,) float32 sums of one row -> outputs, not yet rounded. row: a scalar; column, inside: (B,), places in the row,
    and which there are.
    """
    if alpha_x_ptr is not None:
        y = y * tl.load(alpha_x_ptr + row * X_STRIDE)
    if alpha_w_ptr is not None:
        y = y * tl.load(alpha_w_ptr + column * W_STRIDE, mask=inside, other=0.0)
    if bias_ptr is not None:
        y = y + tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    return y


@triton.jit
def finished_tile(acc, at_m, at_n, in_m, in_n, alpha_x_ptr, alpha_w_ptr, bias_ptr, X_STRIDE, W_STRIDE):
    """(BM, BN) float32 sums -> outputs, not yet rounded. at_m, in_m: (BM,), rows, and which there are; at_n, in_n:
    (BN,), columns.
    """
    if alpha_x_ptr is not None:
        acc = acc * tl.load(alpha_x_ptr + at_m * X_STRIDE, mask=in_m, other=0.0)[:, None]
    if alpha_w_ptr is not None:
        acc = acc * tl.load(alpha_w_ptr + at_n * W_STRIDE, mask=in_n, other=0.0)[None, :]
    if bias_ptr is not None:
        acc = acc + tl.load(bias_ptr + at_n, mask=in_n, other=0.0).to(tl.float32)[None, :]
    return acc


@triton.jit
def _rescale(
    acc_ptr, alpha_x_ptr, alpha_w_ptr, bias_ptr, y_ptr, n, X_STRIDE, W_STRIDE, B: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    column = tl.program_id(1) * B + tl.arange(0, B)
    at = tl.cast(row, tl.int64) * n + column
    y = tl.load(acc_ptr + at, mask=column < n, other=0.0)
    y = finished(y, row, column, column < n, alpha_x_ptr, alpha_w_ptr, bias_ptr, X_STRIDE, W_STRIDE)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=column < n)


def rescale(
    acc_MN: Tensor, alpha_x: Tensor | None, alpha_w: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """(M, N) in `dtype`. alpha_x: (M, 1) or (1, 1); alpha_w: (N, 1) or (1, 1); both float32."""
    m, n = acc_MN.shape
    y_MN = torch.empty(m, n, dtype=dtype, device=acc_MN.device)
    x_scales, w_scales = (0 if a is None else a.numel() for a in (alpha_x, alpha_w))
    _rescaler(m, n, x_scales > 1, w_scales > 1)(acc_MN, alpha_x, alpha_w, bias, y_MN)
    return y_MN


@lru_cache(LAUNCHES)
def _rescaler(m: int, n: int, x_rows: bool, w_rows: bool) -> Launch:
    grid = m, triton.cdiv(n, _B)
    return Launch(_rescale, grid, n=n, X_STRIDE=int(x_rows), W_STRIDE=int(w_rows), B=_B, enable_fp_fusion=False)
