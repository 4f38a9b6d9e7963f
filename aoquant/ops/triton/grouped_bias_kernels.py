"""Biases of experts, added to sorted rows, and their gradient, for a GPU.

The gradient of an expert's bias is the sum of its rows. Only the device knows how many rows it has. So each expert has
the same number of programs, which take its rows in turns; their sums are then added in one order.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import LAUNCHES, Launch

PARTS = 8  # programs that share an expert's rows
ROWS, COLUMNS = 32, 128  # of a tile of the gradient


@triton.jit
def _add(x_ptr, bias_ptr, expert_ptr, y_ptr, n, B: tl.constexpr):
    """A row of x."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * B + tl.arange(0, B)
    inside = column < n
    x = tl.load(x_ptr + row * n + column, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + tl.load(expert_ptr + row) * n + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * n + column, (x + bias).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _sums(grad_ptr, ends_ptr, partial_ptr, n, PARTS: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """(PARTS, E, N) float32: sums over every PARTS-th tile of R rows."""
    expert, part = tl.program_id(1), tl.program_id(2)
    start, end = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0), tl.load(ends_ptr + expert)
    column = tl.program_id(0) * C + tl.arange(0, C)
    acc = tl.zeros([R, C], tl.float32)
    for first in range(start + part * R, end, PARTS * R):
        row = first + tl.arange(0, R)
        at = row.to(tl.int64)[:, None] * n + column[None, :]
        acc += tl.load(grad_ptr + at, mask=(row < end)[:, None] & (column < n)[None, :], other=0.0).to(tl.float32)
    at = (part * tl.num_programs(1) + expert).to(tl.int64) * n + column
    tl.store(partial_ptr + at, tl.sum(acc, axis=0), mask=column < n)


def add(x_SN: Tensor, bias_EN: Tensor, expert: Tensor) -> Tensor:
    """(S, N): x and each row's bias, added in float32 and rounded once. All contiguous."""
    y_SN = torch.empty_like(x_SN)
    _adder(*x_SN.shape)(x_SN, bias_EN, expert, y_SN)
    return y_SN


@lru_cache(LAUNCHES)
def _adder(rows: int, n: int) -> Launch:
    width = min(triton.next_power_of_2(n), 2048)
    return Launch(_add, (rows, triton.cdiv(n, width)), n=n, B=width)


def summed(grad_SN: Tensor, ends: Tensor) -> Tensor:
    """(E, N) float32: for each expert the sum of its rows, contiguous."""
    experts, n = ends.shape[0], grad_SN.shape[1]
    partial = torch.empty(PARTS, experts, n, dtype=torch.float32, device=grad_SN.device)
    _summer(experts, n)(grad_SN, ends, partial)
    return partial.sum(0)


@lru_cache(LAUNCHES)
def _summer(experts: int, n: int) -> Launch:
    return Launch(_sums, (triton.cdiv(n, COLUMNS), experts, PARTS), n=n, PARTS=PARTS, R=ROWS, C=COLUMNS, num_warps=4)
