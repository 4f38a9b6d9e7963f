"""y = x W^T for few rows of x and a packed 4-bit W, for installs without the CUDA library: each code is decoded once,
in registers.

A layer that serves a few tokens waits for the bytes of W, and four bits are a quarter of them. A program reads a tile
of codes as they lie, two to a byte; low nibbles are the even k, high ones the odd k, so each half of the byte meets its
own half of x and nothing has to be interleaved. Programs share out K too, each a range of tiles. They write float32
sums to memory, and a second small kernel adds these in order and applies the epilogue of the "aoquant" contract. How K
is cut depends on N and K alone, so a row of y does not depend on how many rows there are.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from aoquant.formats import Encoded, Format

from .element_codes import e2m1_decoded, e8m0_value
from .epilogue import finished
from .integer_kernels import _int4_values
from .launch import multiprocessors

ROWS = 64  # of x, at most
BN, BK = 64, 128  # a tile: rows of W, k
LAUNCH: dict[str, Any] = {"enable_fp_fusion": False}


@triton.jit
def _operand(code, s, z, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """(BN, H) uint8 codes, in the lowest four bits; s, z: multiplier and addend -> (BN, H) in DTYPE."""
    code = code.to(tl.int32)
    if KIND == "int4":
        return _int4_values(((code ^ 8) - 8).to(tl.float32), s, z, DTYPE, DTYPE)
    value = e2m1_decoded(code << 28) * s
    return (value + z if KIND == "gridflip" else value).to(DTYPE)


@triton.jit
def decoded_sums(
    x_ptr, codes_ptr, scale_ptr, zero_ptr, at_row, at_scale_row, at_token, k, first_tile, tiles,
    KIND: tl.constexpr, GROUP: tl.constexpr, SHIFT: tl.constexpr, ODD_SHIFT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """(BN, BM) float32: sums over `tiles` tiles of K from `first_tile` on, of BN rows of W times BM rows of x.

    at_row, at_scale_row: (BN, 1) int64, rows of the codes and of the scales; at_token: (BM, 1) int64, rows of x. WHOLE:
    all tiles lie inside K, nothing is masked.
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    H: tl.constexpr = BK // 2
    SPAN: tl.constexpr = min(GROUP, BK)  # values of a tile that share a scale
    row_bytes = k // 2
    byte, value, block = tl.arange(0, H)[None, :], tl.arange(0, BK)[None, :], tl.arange(0, BK // SPAN)[None, :]
    acc = tl.zeros((BN, BM), tl.float32)
    for tile in range(tiles):
        start = (first_tile + tile) * BK
        at_codes = codes_ptr + at_row * row_bytes + start // 2 + byte
        at_scale = at_scale_row * (k // GROUP) + (start + block * SPAN) // GROUP
        at_x = x_ptr + at_token * k + start + value
        if WHOLE:
            codes, raw, x = tl.load(at_codes), tl.load(scale_ptr + at_scale), tl.load(at_x)
        else:
            codes = tl.load(at_codes, mask=start // 2 + byte < row_bytes, other=0)
            raw = tl.load(scale_ptr + at_scale, mask=start + block * SPAN < k, other=0)
            x = tl.load(at_x, mask=start + value < k, other=0.0)
        zero = 0.0
        if KIND == "int4":
            scale = raw.to(tl.float32)
            if WHOLE:
                zero = tl.load(zero_ptr + at_scale).to(tl.float32)
            else:
                zero = tl.load(zero_ptr + at_scale, mask=start + block * SPAN < k, other=0).to(tl.float32)
        elif KIND == "e8m0":
            scale = e8m0_value(raw.to(tl.int32))
        else:
            scale = raw.to(tl.float8e4nv, bitcast=True).to(tl.float32)
            if KIND == "gridflip":
                zero = tl.where(block % 2 == 0, SHIFT, ODD_SHIFT) * tl.minimum(
                    scale, 0.0, propagate_nan=tl.PropagateNan.ALL
                )
        if SPAN < BK:
            scale = tl.reshape(tl.broadcast_to(scale[:, :, None], (BN, BK // SPAN, SPAN // 2)), (BN, H))
            if KIND == "int4" or KIND == "gridflip":
                zero = tl.reshape(tl.broadcast_to(zero[:, :, None], (BN, BK // SPAN, SPAN // 2)), (BN, H))  # type: ignore[index]
        even, odd = tl.split(tl.reshape(x, (BM, H, 2)))
        acc = tl.dot(_operand(codes & 15, scale, zero, KIND, DTYPE), even.T, acc)
        acc = tl.dot(_operand(codes >> 4, scale, zero, KIND, DTYPE), odd.T, acc)
    return acc


@triton.jit
def _partial(
    x_ptr, codes_ptr, scale_ptr, zero_ptr, partial_ptr, m, n, k, tiles_per_split,
    KIND: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, SHIFT: tl.constexpr, ODD_SHIFT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Sums over one range of tiles along K: (splits, m, n) float32. WHOLE: the ranges fill K."""
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    split, token = tl.program_id(1), tl.program_id(2) * BM + tl.arange(0, BM)
    at_row = tl.minimum(row, n - 1).to(tl.int64)[:, None]
    at_token = tl.minimum(token, m - 1).to(tl.int64)[:, None]
    acc = decoded_sums(
        x_ptr, codes_ptr, scale_ptr, zero_ptr, at_row, at_row // TILE, at_token, k, split * tiles_per_split, tiles_per_split,
        KIND, GROUP, SHIFT, ODD_SHIFT, BM, BN, BK, WHOLE,
    )  # fmt: skip
    at = (split * m + token).to(tl.int64)[None, :] * n + row[:, None]
    tl.store(partial_ptr + at, acc, mask=(row < n)[:, None] & (token < m)[None, :])


@triton.jit
def _finish(
    partial_ptr, alpha_x_ptr, alpha_w_ptr, bias_ptr, y_ptr, m, n, X_STRIDE, W_STRIDE, SPLITS: tl.constexpr, B: tl.constexpr
):  # fmt: skip
    """rn(sum * alpha_x * alpha_w + bias), the splits added in order."""
    row = tl.program_id(0)
    column = tl.program_id(1) * B + tl.arange(0, B)
    inside = column < n
    at = row.to(tl.int64) * n + column
    y = tl.load(partial_ptr + at, mask=inside, other=0.0)
    for split in tl.static_range(1, SPLITS):
        y += tl.load(partial_ptr + at + tl.cast(m, tl.int64) * n * split, mask=inside, other=0.0)
    y = finished(y, row, column, inside, alpha_x_ptr, alpha_w_ptr, bias_ptr, X_STRIDE, W_STRIDE)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@cache
def _tiles_of_a_split(device: torch.device, n: int, k: int) -> int:
    """Enough programs for two on each multiprocessor."""
    programs = 2 * multiprocessors(device)
    columns, tiles = triton.cdiv(n, BN), triton.cdiv(k, BK)
    splits = max(1, min(programs // columns, tiles, 8))
    return triton.cdiv(tiles, splits)


def decode_mm(
    format: Format,
    kind: str,
    w: Encoded,
    x_MK: Tensor,
    alpha_x: Tensor | None,
    alpha_w: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """(M, N) in x's dtype. kind: that of ops/gemm/few_rows.py. alpha_x: (M, 1) or (1, 1);
    alpha_w: (N, 1) or (1, 1); both float32.
    """
    assert format.block is not None
    (m, k), n = x_MK.shape, w.codes.shape[0]
    per_split = _tiles_of_a_split(x_MK.device, n, k)
    splits = triton.cdiv(triton.cdiv(k, BK), per_split)
    bm = 16 if m <= 16 else triton.next_power_of_2(min(m, ROWS))
    scale = w.scales.contiguous() if kind == "int4" else w.scales.contiguous().view(torch.uint8)
    partial = torch.empty(splits, m, n, dtype=torch.float32, device=x_MK.device)
    _partial[(triton.cdiv(n, BN), splits, triton.cdiv(m, bm))](
        x_MK.contiguous(), w.codes.contiguous(), scale, None if w.zero is None else w.zero.contiguous(), partial, m, n, k, per_split,
        KIND=kind, GROUP=format.block, TILE=format.tile_rows, SHIFT=format.shifts[0], ODD_SHIFT=format.shifts[1],
        BM=bm, BN=BN, BK=BK, WHOLE=k == splits * per_split * BK, num_warps=4, num_stages=4, **LAUNCH,
    )  # fmt: skip
    y_MN = torch.empty(m, n, dtype=x_MK.dtype, device=x_MK.device)
    _finish[(m, triton.cdiv(n, 1024))](
        partial, alpha_x, alpha_w, bias, y_MN, m, n, int(alpha_x is not None and alpha_x.numel() > 1),
        int(alpha_w is not None and alpha_w.numel() > 1), SPLITS=splits, B=1024, **LAUNCH,
    )  # fmt: skip
    return y_MN
