"""Moves the codes of x to the places of the codes of x^T: the column side of a format whose tiles are square.

Bytes move unchanged, tile by tile through shared memory, so both the reads and the writes go along rows. Codes of 4
bits are paired anew, along the other axis. The result is zero behind the last row.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .element_codes import pack4, unpack4
from .launch import LAUNCHES, Launch

T = 128  # rows and columns of a tile


@triton.jit
def _transpose(x_ptr, y_ptr, rows, k, padded, PAIRS: tl.constexpr, T: tl.constexpr):
    """x (rows, k) -> y (k, padded). PAIRS: codes of 4 bits, two to a byte."""
    row, column = tl.program_id(0) * T + tl.arange(0, T), tl.program_id(1) * T + tl.arange(0, T)
    row, column = row.to(tl.int64), column.to(tl.int64)
    if PAIRS:
        byte = (tl.program_id(1) * (T // 2) + tl.arange(0, T // 2)).to(tl.int64)
        inside = (row < rows)[:, None] & (byte < k // 2)[None, :]
        x = tl.load(x_ptr + row[:, None] * (k // 2) + byte[None, :], mask=inside, other=0)
        y = pack4(tl.trans(unpack4(x, T, T) & 15), T, T).to(tl.uint8)
        byte = (tl.program_id(0) * (T // 2) + tl.arange(0, T // 2)).to(tl.int64)
        inside = (column < k)[:, None] & (byte < padded // 2)[None, :]
        tl.store(y_ptr + column[:, None] * (padded // 2) + byte[None, :], y, mask=inside)
    else:
        inside = (row < rows)[:, None] & (column < k)[None, :]
        x = tl.load(x_ptr + row[:, None] * k + column[None, :], mask=inside, other=0)
        inside = (column < k)[:, None] & (row < padded)[None, :]
        tl.store(y_ptr + column[:, None] * padded + row[None, :], tl.trans(x), mask=inside)


@lru_cache(LAUNCHES)
def _mover(rows: int, k: int, padded: int, pairs: bool) -> Launch:
    grid = triton.cdiv(padded, T), triton.cdiv(k, T)
    return Launch(_transpose, grid, rows=rows, k=k, padded=padded, PAIRS=pairs, T=T, num_warps=8)


def transposed(codes: Tensor, k: int, padded: int, bits: int) -> Tensor:
    """uint8 codes (R, bytes of k) -> uint8 (k, bytes of padded), for codes of 4 or 8 bits; k and padded even."""
    rows, pairs = codes.shape[0], bits == 4
    y = torch.empty(k, padded // 2 if pairs else padded, dtype=torch.uint8, device=codes.device)
    _mover(rows, k, padded, pairs)(codes.contiguous(), y)
    return y
