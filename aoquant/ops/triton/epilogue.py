"""The epilogue of the "aoquant" contract: rn(acc * alpha_x * alpha_w + bias), in the reference's order, each step in float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rescale(
    acc_ptr, alpha_x_ptr, alpha_w_ptr, bias_ptr, y_ptr, n, X_STRIDE, W_STRIDE, B: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    column = tl.program_id(1) * B + tl.arange(0, B)
    at = tl.cast(row, tl.int64) * n + column
    y = tl.load(acc_ptr + at, mask=column < n, other=0.0)
    if alpha_x_ptr is not None:
        y = y * tl.load(alpha_x_ptr + row * X_STRIDE)
    if alpha_w_ptr is not None:
        y = y * tl.load(alpha_w_ptr + column * W_STRIDE, mask=column < n, other=0.0)
    if bias_ptr is not None:
        y = y + tl.load(bias_ptr + column, mask=column < n, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=column < n)


def rescale(
    acc_MN: Tensor, alpha_x: Tensor | None, alpha_w: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """(M, N) in `dtype`. alpha_x: (M, 1) or (1, 1); alpha_w: (N, 1) or (1, 1); both float32."""
    m, n = acc_MN.shape
    y_MN = torch.empty(m, n, dtype=dtype, device=acc_MN.device)
    _rescale[(m, triton.cdiv(n, 2048))](
        acc_MN, alpha_x, alpha_w, bias, y_MN, n,
        int(alpha_x is not None and alpha_x.numel() > 1), int(alpha_w is not None and alpha_w.numel() > 1),
        B=2048, enable_fp_fusion=False,
    )  # fmt: skip
    return y_MN
