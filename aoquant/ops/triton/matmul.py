"""A GEMM whose epilogue is the "aoquant" contract: rn(acc * alpha_x * alpha_w + bias), without a float32 matrix in
memory.

One program per multiprocessor walks over 128 x 256 tiles of y, eight tile rows at a time so that W stays in the L2
cache; tiles come through the bulk tensor copy engine, and K is summed in order, so a row of y does not depend on how
many rows there are. On an H200 it runs within 3 % of cuBLAS's bf16 GEMM, which has no epilogue with scales that live on
the device.
Schedule: Triton's tutorial 09, "Persistent Matmul".
"""

from __future__ import annotations

from functools import cache, lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .epilogue import finished_tile
from .launch import LAUNCHES, Launch, described, multiprocessors

TILE_M, TILE_N, TILE_K = 128, 256, 64


@triton.jit
def _matmul(
    x_desc, w_desc, y_desc, alpha_x_ptr, alpha_w_ptr, bias_ptr, m, n, k, X_STRIDE: tl.constexpr, W_STRIDE: tl.constexpr,
    X_ACROSS: tl.constexpr, W_ACROSS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """A stride of 0: one alpha for all. X_ACROSS, W_ACROSS: the memory is that of the transpose, (k, m) or (k, n)."""
    rows, columns, steps = tl.cdiv(m, BM), tl.cdiv(n, BN), tl.cdiv(k, BK)
    for tile in tl.range(tl.program_id(0), rows * columns, PROGRAMS, flatten=True):
        first = tile // (GROUP * columns) * GROUP
        height = min(rows - first, GROUP)
        row = (first + tile % height) * BM
        column = tile % (GROUP * columns) // height * BN
        acc = tl.zeros((BM, BN), tl.float32)
        for step in range(steps):
            if X_ACROSS:
                x = x_desc.load([step * BK, row]).T
            else:
                x = x_desc.load([row, step * BK])
            if W_ACROSS:
                w = w_desc.load([step * BK, column])
            else:
                w = w_desc.load([column, step * BK]).T
            acc = tl.dot(x, w, acc)
        at_m, at_n = row + tl.arange(0, BM), column + tl.arange(0, BN)
        acc = finished_tile(acc, at_m, at_n, at_m < m, at_n < n, alpha_x_ptr, alpha_w_ptr, bias_ptr, X_STRIDE, W_STRIDE)
        y_desc.store([row, column], acc.to(y_desc.dtype))


@cache
def _capability(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]


def why_not(x_MK: Tensor, w_NK: Tensor) -> str | None:
    """Return why this kernel cannot multiply these, or None."""
    if _capability(x_MK.device) < 9:
        return "the bulk tensor copy engine needs compute capability 9.0"
    if x_MK.shape[1] % 8 or w_NK.shape[0] % 8:
        return f"K and N have to be multiples of 8, got {x_MK.shape[1]} and {w_NK.shape[0]}"
    lie = all(t.is_contiguous() or _is_across(t) for t in (x_MK, w_NK))
    if not lie or x_MK.data_ptr() % 16 or w_NK.data_ptr() % 16:
        return "operands have to be contiguous, from addresses that are multiples of 16"
    return None


def _is_across(x_RC: Tensor) -> bool:
    """Return whether x's memory is that of its transpose, which the copy engine reads."""
    return x_RC.stride(0) == 1 and x_RC.shape[0] % 8 == 0 and x_RC.t().is_contiguous()


def matmul(
    x_MK: Tensor,
    w_NK: Tensor,
    alpha_x: Tensor | None,
    alpha_w: Tensor | None,
    bias: Tensor | None,
    y_MN: Tensor | None = None,
) -> Tensor:
    """(M, N) in x's dtype, bfloat16 or float16. alpha_x: (M, 1) or (1, 1); alpha_w: (N, 1) or (1, 1); both float32.

    x_MK, w_NK: their memory may be that of their transposes.
    y_MN: where it is written; some columns of a matrix, whose first is a multiple of 8.
    """
    (m, k), n = x_MK.shape, w_NK.shape[0]
    if y_MN is None:
        y_MN = torch.empty(m, n, dtype=x_MK.dtype, device=x_MK.device)
    x_across, w_across = not x_MK.is_contiguous(), not w_NK.is_contiguous()
    x_desc = described(x_MK.t(), TILE_K, TILE_M) if x_across else described(x_MK, TILE_M, TILE_K)
    w_desc = described(w_NK.t(), TILE_K, TILE_N) if w_across else described(w_NK, TILE_N, TILE_K)
    x_rows, w_rows = [a is not None and a.numel() > 1 for a in (alpha_x, alpha_w)]
    launch = _matmul_of(m, n, k, x_rows, w_rows, x_across, w_across, multiprocessors(x_MK.device))
    launch(x_desc, w_desc, described(y_MN, TILE_M, TILE_N), alpha_x, alpha_w, bias)
    return y_MN


@lru_cache(LAUNCHES)
def _matmul_of(
    m: int, n: int, k: int, x_rows: bool, w_rows: bool, x_across: bool, w_across: bool, programs: int
) -> Launch:
    return Launch(
        _matmul, (programs,), m=m, n=n, k=k, X_STRIDE=int(x_rows), W_STRIDE=int(w_rows), X_ACROSS=x_across, W_ACROSS=w_across,
        BM=TILE_M, BN=TILE_N, BK=TILE_K, GROUP=8, PROGRAMS=programs, num_warps=8, num_stages=3, enable_fp_fusion=False,
    )  # fmt: skip
