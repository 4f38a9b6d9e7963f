"""The range of a whole tensor, as partial results that the next kernel finishes.

An atomic maximum would need a cleared buffer, one more launch. Instead each of PARTIALS programs stores the range of
what it read, and every program of the kernel that follows reduces those few kilobytes, which sit in the L2 cache.
Deterministic, like any maximum.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .element_codes import INF_BITS, float_bits, least, most
from .launch import LAUNCHES, Launch

PARTIALS = 512
_TILE, _WARPS = 8192, 8


@triton.jit
def _absmax(x_ptr, partial_ptr, n, FINITE: tl.constexpr, TILE: tl.constexpr):
    most = tl.zeros([TILE], tl.int32)
    for i in range(tl.program_id(0), tl.cdiv(n, TILE), tl.num_programs(0)):
        at = tl.cast(i, tl.int64) * TILE + tl.arange(0, TILE)
        x = tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32)
        bits = float_bits(x) & 0x7FFFFFFF
        if FINITE:
            bits = tl.where(bits < INF_BITS, bits, 0)
        most = tl.maximum(most, bits)
    tl.store(partial_ptr + tl.program_id(0), tl.max(most, axis=0))


def absmax_partials(x: Tensor, finite: bool = False) -> Tensor:
    """(PARTIALS,) int32: maxima of the bits of |x| as float32, so that NaN is larger than everything; or of what is
    finite. x is contiguous.
    """
    partials = torch.empty(PARTIALS, dtype=torch.int32, device=x.device)
    _absmax_of(x.numel(), finite)(x, partials)
    return partials


@triton.jit
def _row_absmax(x_ptr, found_ptr, k, FINITE: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0)
    x_ptr += tl.cast(row, tl.int64) * k
    most = tl.zeros([TILE], tl.int32)
    for start in range(0, k, TILE):
        at = start + tl.arange(0, TILE)
        bits = float_bits(tl.load(x_ptr + at, mask=at < k, other=0.0).to(tl.float32)) & 0x7FFFFFFF
        if FINITE:
            bits = tl.where(bits < INF_BITS, bits, 0)
        most = tl.maximum(most, bits)
    tl.store(found_ptr + row, tl.max(most, axis=0))


def row_absmax(x_RK: Tensor, finite: bool = False) -> Tensor:
    """(R,) int32: the same maximum for each row of a contiguous matrix."""
    found = torch.empty(x_RK.shape[0], dtype=torch.int32, device=x_RK.device)
    _row_absmax_of(*x_RK.shape, finite)(x_RK, found)
    return found


@lru_cache(LAUNCHES)
def _row_absmax_of(rows: int, k: int, finite: bool) -> Launch:
    return Launch(_row_absmax, (rows,), k=k, FINITE=finite, TILE=min(triton.next_power_of_2(k), 4096), num_warps=4)


@lru_cache(LAUNCHES)
def _absmax_of(n: int, finite: bool) -> Launch:
    return Launch(_absmax, (PARTIALS,), n=n, FINITE=finite, TILE=_TILE, num_warps=_WARPS)


@triton.jit
def _range(x_ptr, partial_ptr, n, TILE: tl.constexpr, N_PARTIALS: tl.constexpr):
    low = tl.full([TILE], float("inf"), tl.float32)
    high = -low
    for i in range(tl.program_id(0), tl.cdiv(n, TILE), tl.num_programs(0)):
        at = tl.cast(i, tl.int64) * TILE + tl.arange(0, TILE)
        x = tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32)  # 0 is in the range of every affine format
        low = least(low, x)
        high = most(high, x)
    tl.store(partial_ptr + tl.program_id(0), tl.reduce(low, 0, least))
    tl.store(partial_ptr + N_PARTIALS + tl.program_id(0), tl.reduce(high, 0, most))


def range_partials(x: Tensor) -> Tensor:
    """(2, PARTIALS) float32: minima and maxima, NaN where there was one. x is contiguous."""
    partials = torch.empty(2, PARTIALS, dtype=torch.float32, device=x.device)
    _range_of(x.numel())(x, partials)
    return partials


@lru_cache(LAUNCHES)
def _range_of(n: int) -> Launch:
    return Launch(_range, (PARTIALS,), n=n, TILE=_TILE, N_PARTIALS=PARTIALS, num_warps=_WARPS)
