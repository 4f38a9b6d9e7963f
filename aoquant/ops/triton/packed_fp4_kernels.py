"""A GEMM of two packed FP4 matrices: codes and block scales are read, and become bf16 operands in registers.

Products of e2m1 codes and block scales are exact in bf16, so a bf16 tensor core sums what an FP4 one sums. Only codes
and scales are read, a quarter of the bytes of bf16 operands, and no operand is written. So this is the GEMM for a
device without memory for the operands. Low and high nibbles (even and odd k) make two half tiles, multiplied one after
the other; every launch adds K in that order, 64 rows or more to an instruction, so a row's result does not depend on
how many rows there are. The epilogue is the contract "aoquant": rn(acc * alpha_x * alpha_w + bias).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .element_codes import e2m1_decoded, e8m0_value
from .epilogue import finished_tile

BLOCK_K = 128


@triton.jit
def _scales(ptr, row, inside, step, groups, B: tl.constexpr, BK: tl.constexpr):
    """(rows, BK / B) float32."""
    at = step * (BK // B) + tl.arange(0, BK // B)
    mask = inside[:, None] & (at < groups)[None, :]
    byte = tl.load(ptr + row[:, None] * groups + at[None, :], mask=mask, other=0)
    if B == 32:
        return e8m0_value(byte.to(tl.int32))
    return byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def _halves(codes_ptr, scale_ptr, row, inside, step, k, ROWS: tl.constexpr, B: tl.constexpr, BK: tl.constexpr):
    """Operands of even and of odd k, (rows, BK / 2) bf16 each."""
    at = step * (BK // 2) + tl.arange(0, BK // 2)
    mask = inside[:, None] & (at < k // 2)[None, :]
    both = tl.load(codes_ptr + row[:, None] * (k // 2) + at[None, :], mask=mask, other=0).to(tl.int32)
    scale = _scales(scale_ptr, row, inside, step, k // B, B, BK)[:, :, None]
    scale = tl.reshape(tl.broadcast_to(scale, (ROWS, BK // B, B // 2)), (ROWS, BK // 2))
    low = e2m1_decoded(both << 28) * scale
    high = e2m1_decoded(both << 24) * scale
    return low.to(tl.bfloat16), high.to(tl.bfloat16)


@triton.jit
def _multiply(
    x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, y_ptr, alpha_x_ptr, alpha_w_ptr, bias_ptr, m, n, k,
    X_STRIDE: tl.constexpr, W_STRIDE: tl.constexpr, XB: tl.constexpr, WB: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """A stride of 0: one alpha for all."""
    rows, columns = tl.cdiv(m, BM), tl.cdiv(n, BN)
    tile = tl.program_id(0)
    first = tile // (GROUP * columns) * GROUP
    height = min(rows - first, GROUP)
    at_m = (first + tile % (GROUP * columns) % height) * BM + tl.arange(0, BM)
    at_n = tile % (GROUP * columns) // height * BN + tl.arange(0, BN)
    in_m, in_n = at_m < m, at_n < n
    row_m, row_n = at_m.to(tl.int64), at_n.to(tl.int64)
    acc = tl.zeros((BM, BN), tl.float32)
    for step in range(tl.cdiv(k, BK)):
        x_even, x_odd = _halves(x_ptr, x_scale_ptr, row_m, in_m, step, k, BM, XB, BK)
        w_even, w_odd = _halves(w_ptr, w_scale_ptr, row_n, in_n, step, k, BN, WB, BK)
        acc = tl.dot(x_even, tl.trans(w_even), acc)
        acc = tl.dot(x_odd, tl.trans(w_odd), acc)
    acc = finished_tile(acc, at_m, at_n, in_m, in_n, alpha_x_ptr, alpha_w_ptr, bias_ptr, X_STRIDE, W_STRIDE)
    tl.store(
        y_ptr + row_m[:, None] * n + at_n[None, :], acc.to(y_ptr.dtype.element_ty), mask=in_m[:, None] & in_n[None, :]
    )


def multiply(
    x: tuple[Tensor, Tensor],
    w: tuple[Tensor, Tensor],
    k: int,
    alpha_x: Tensor | None,
    alpha_w: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """(M, N) in `dtype`. x, w: codes (rows, K / 2) uint8 and block scales (rows, K / 32) e8m0 or (rows, K / 16) e4m3;
    alphas as in matmul.py.
    """
    (x_codes, x_scale), (w_codes, w_scale) = ((c.contiguous(), s.contiguous()) for c, s in (x, w))
    m, n = x_codes.shape[0], w_codes.shape[0]
    y_MN = torch.empty(m, n, dtype=dtype, device=x_codes.device)
    block_m, block_n, warps = (64, 64, 4) if m <= 64 or n <= 64 else (128, 128, 8)
    grid = (triton.cdiv(m, block_m) * triton.cdiv(n, block_n),)
    _multiply[grid](
        x_codes, x_scale.view(torch.uint8), w_codes, w_scale.view(torch.uint8), y_MN, alpha_x, alpha_w, bias, m, n, k,
        int(alpha_x is not None and alpha_x.numel() > 1), int(alpha_w is not None and alpha_w.numel() > 1),
        XB=k // x_scale.shape[1], WB=k // w_scale.shape[1], BM=block_m, BN=block_n, BK=BLOCK_K, GROUP=8,
        num_warps=warps, num_stages=3, enable_fp_fusion=False,
    )  # fmt: skip
    return y_MN
