"""llama.cpp's product of quantised rows, the contract "ggml": integer sums of 32 products on int8 tensor cores, each
times the product of its two scales, added in float32 in K's order.

One program makes a tile of y. K cannot be cut between programs, because the order of the additions is the contract's:
with few rows of x there are few programs, and each walks all of K. What is exact and what is
rounded: `gemm/ggml_gemm.py`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from aoquant.formats import Encoded, Ggml

from .ggml_kernels import B, block_integers
from .launch import LAUNCHES, Launch

GROUP = 8  # tile rows that are walked together, so that W stays in the L2 cache


@triton.jit
def _matmul(
    x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, w_zero_ptr, bias_ptr, y_ptr, m, n, blocks, X: tl.constexpr, W: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """X, W: kinds of the formats. blocks: of a row."""
    rows, columns, tile = tl.cdiv(m, BM), tl.cdiv(n, BN), tl.program_id(0)
    first = tile // (GROUP * columns) * GROUP
    height = min(rows - first, GROUP)
    at_m = ((first + tile % (GROUP * columns) % height) * BM + tl.arange(0, BM)).to(tl.int64)
    at_n = (tile % (GROUP * columns) // height * BN + tl.arange(0, BN)).to(tl.int64)
    in_m, in_n = at_m < m, at_n < n
    x_at, w_at = tl.where(in_m, at_m, 0) * blocks, tl.where(in_n, at_n, 0) * blocks  # a tile's rest repeats row 0
    acc = tl.zeros((BM, BN), tl.float32)
    for block in range(blocks):
        x = block_integers(x_ptr, x_at + block, None, X, BM, B).to(tl.int8)
        w = block_integers(w_ptr, w_at + block, None, W, BN, B).to(tl.int8)
        dx = tl.load(x_scale_ptr + (x_at + block)).to(tl.float32)
        dw = tl.load(w_scale_ptr + (w_at + block)).to(tl.float32)
        acc += tl.dot(x, tl.trans(w), out_dtype=tl.int32).to(tl.float32) * (dx[:, None] * dw[None, :])
        if w_zero_ptr is not None:
            low = tl.load(w_zero_ptr + (w_at + block)).to(tl.float32)
            acc += (dx * tl.sum(x.to(tl.int32), axis=1).to(tl.float32))[:, None] * low[None, :]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + at_n, mask=in_n, other=0.0).to(tl.float32)[None, :]
    y_at = at_m[:, None] * n + at_n[None, :]
    tl.store(y_ptr + y_at, acc.to(y_ptr.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])


class Tile(NamedTuple):
    """Rows and columns of y that a program makes, and its warps and loads under way."""

    m: int
    n: int
    warps: int
    stages: int


def tile_of(m: int) -> Tile:
    """For m rows of x."""
    if m <= 16:
        return Tile(16, 32, 4, 6)
    return Tile(64, 64, 4, 4) if m <= 256 else Tile(128, 128, 8, 4)


def matmul(x: Encoded, x_format: Ggml, w: Encoded, w_format: Ggml, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """(M, N) in `dtype`. x: in 8 bits. bias: (N,)."""
    m, n = x.codes.shape[0], w.codes.shape[0]
    y_MN = torch.empty(m, n, dtype=dtype, device=x.codes.device)
    zero = None if w.zero is None else w.zero.contiguous()
    codes_and_scales = [t.contiguous() for t in (x.codes, x.scales, w.codes, w.scales)]
    _matmul_of(m, n, x.k // B, x_format, w_format)(*codes_and_scales, zero, bias, y_MN)
    return y_MN


@lru_cache(LAUNCHES)
def _matmul_of(m: int, n: int, blocks: int, x_format: Ggml, w_format: Ggml) -> Launch:
    tile = tile_of(m)
    return Launch(
        _matmul, (triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n),), m=m, n=n, blocks=blocks, X=x_format.kind,
        W=w_format.kind, BM=tile.m, BN=tile.n, GROUP=GROUP, B=B, num_warps=tile.warps, num_stages=tile.stages,
        enable_fp_fusion=False,
    )  # fmt: skip
