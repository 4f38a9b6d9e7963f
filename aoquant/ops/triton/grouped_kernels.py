"""A grouped GEMM: rows of x sorted by expert, each expert's rows times its own W, in one launch.

Only the device knows which rows an expert has. So a small kernel first cuts each expert's rows into slots of BM rows,
and writes down the expert and the rows of each slot; an expert without rows has no slot. One program for each
multiprocessor then walks over slots x columns as `matmul.py` walks over its tiles, so nothing waits for the host. x and
W come through the bulk tensor copy engine. The last rows that a slot reads may be the next expert's: the kernel
multiplies them, and does not store the result. K is summed in order, so a row of y depends on that row and on its
expert's W alone. The epilogue is the contract "aoquant" without a bias.

W may be a range of the experts, or a range of columns of one expert: the part that is decoded at a time. Its memory is
(E, N, K) or (E, K, N). The tensor core reads a tile from shared memory in either order, and adds the same products in
the same order.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import LAUNCHES, Launch, described, multiprocessors

TILE_M, TILE_N, TILE_K = 128, 256, 64
_SLOTS = 16  # that a program of `_slots` writes


@triton.jit
def slot_of(ends_ptr, slot, first, experts, BM, E: tl.constexpr):
    """Slots (B,) -> (expert, counted from `first`; first row; row behind its last one; number of all slots), all (B,)
    but the number. E: a power of two, at least `experts`.
    """
    e = tl.arange(0, E)
    end = tl.load(ends_ptr + first + e, mask=e < experts, other=0)
    start = tl.load(ends_ptr + first + e - 1, mask=(e < experts) & (first + e > 0), other=0)
    tiles = (end - start + BM - 1) // BM
    upto = tl.cumsum(tiles, 0)
    expert = tl.sum((upto[None, :] <= slot[:, None]).to(tl.int32), 1)
    mine, before = e[None, :] == expert[:, None], e[None, :] < expert[:, None]
    row = tl.sum(tl.where(mine, start[None, :], 0), 1)
    row += (slot - tl.sum(tl.where(before, tiles[None, :], 0), 1)) * BM
    return expert, row, tl.sum(tl.where(mine, end[None, :], 0), 1), tl.sum(tiles)


@triton.jit
def _slots(
    ends_ptr, expert_ptr, row_ptr, end_ptr, count_ptr, first, experts, n_slots, BM, E: tl.constexpr, B: tl.constexpr
):  # fmt: skip
    slot = tl.program_id(0) * B + tl.arange(0, B)
    expert, row, end, count = slot_of(ends_ptr, slot, first, experts, BM, E)
    inside = slot < n_slots
    tl.store(expert_ptr + slot, expert, mask=inside)
    tl.store(row_ptr + slot, row, mask=inside)
    tl.store(end_ptr + slot, end, mask=inside)
    tl.store(count_ptr, count, mask=tl.program_id(0) == 0)


@triton.jit
def _matmul(
    x_desc, w_desc, y_ptr, alpha_x_ptr, alpha_w_ptr, expert_ptr, row_ptr, end_ptr, count_ptr, n, k, y_row,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr, BY_K: tl.constexpr,
):  # fmt: skip
    """y_row: from a row of y to the next; n: columns of W that are there. BY_K: W's memory is (E, K, N)."""
    slots, columns, steps = tl.load(count_ptr), tl.cdiv(n, BN), tl.cdiv(k, BK)
    for tile in tl.range(tl.program_id(0), slots * columns, PROGRAMS, flatten=True):
        first = tile // (GROUP * columns) * GROUP
        height = min(slots - first, GROUP)
        slot = first + tile % (GROUP * columns) % height
        column = tile % (GROUP * columns) // height * BN
        expert, row, end = tl.load(expert_ptr + slot), tl.load(row_ptr + slot), tl.load(end_ptr + slot)
        acc = tl.zeros((BM, BN), tl.float32)
        for step in range(steps):
            x = x_desc.load([row, step * BK])
            if BY_K:
                acc = tl.dot(x, tl.reshape(w_desc.load([expert, step * BK, column]), (BK, BN)), acc)
            else:
                acc = tl.dot(x, tl.reshape(w_desc.load([expert, column, step * BK]), (BN, BK)).T, acc)
        at_m, at_n = row + tl.arange(0, BM), column + tl.arange(0, BN)
        in_m, in_n = at_m < end, at_n < n
        if alpha_x_ptr is not None:
            acc = acc * tl.load(alpha_x_ptr + at_m, mask=in_m, other=0.0)[:, None]
        if alpha_w_ptr is not None:
            acc = acc * tl.load(alpha_w_ptr + expert * n + at_n, mask=in_n, other=0.0)[None, :]
        at = at_m.to(tl.int64)[:, None] * y_row + at_n[None, :]
        tl.store(y_ptr + at, acc.to(y_ptr.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])


@triton.jit
def _zero_behind(y_ptr, ends_ptr, rows, n, last, B: tl.constexpr):
    """Rows behind the last expert's: in the common case there are none, and a program ends at once."""
    row = tl.load(ends_ptr + last) + tl.program_id(0)
    while row < rows:
        for start in range(0, n, B):
            column = start + tl.arange(0, B)
            at = row.to(tl.int64) * n + column
            tl.store(y_ptr + at, tl.zeros([B], y_ptr.dtype.element_ty), mask=column < n)
        row += tl.num_programs(0)


@triton.jit
def _gathered_sum(rows_ptr, place_ptr, y_ptr, k, TOP: tl.constexpr, B: tl.constexpr):
    """Add the TOP rows of one token, wherever they are, in float32 in their order, and round once."""
    token = tl.program_id(0)
    column = tl.program_id(1) * B + tl.arange(0, B)
    inside = column < k
    acc = tl.zeros([B], tl.float32)
    for j in tl.static_range(TOP):
        row = tl.load(place_ptr + token * TOP + j).to(tl.int64)
        acc += tl.load(rows_ptr + row * k + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + token.to(tl.int64) * k + column, acc.to(y_ptr.dtype.element_ty), mask=inside)


class Slots(NamedTuple):
    """expert, row, end: (slots,) int32, of each slot; number: (1,) int32, how many there are."""

    expert: Tensor
    row: Tensor
    end: Tensor
    number: Tensor


def slots(ends: Tensor, rows: int, first: int, experts: int) -> Slots:
    """The slots of `experts` experts from `first` on. ends: (E,) int32, for each expert the row behind its last."""
    most = triton.cdiv(rows, TILE_M) + min(experts, rows)
    expert, row, end = torch.empty(3, most, dtype=torch.int32, device=ends.device).unbind()
    made = Slots(expert, row, end, torch.empty(1, dtype=torch.int32, device=ends.device))
    _slots_of(first, experts, most)(ends, *made)
    return made


@lru_cache(LAUNCHES)
def _slots_of(first: int, experts: int, most: int) -> Launch:
    return Launch(
        _slots, (triton.cdiv(most, _SLOTS),), first=first, experts=experts, n_slots=most, BM=TILE_M,
        E=triton.next_power_of_2(experts), B=_SLOTS,
    )  # fmt: skip


def matmul(
    x_SK: Tensor,
    w_ENK: Tensor,
    alpha_x: Tensor | None,
    alpha_w: Tensor | None,
    at: Slots,
    y_SN: Tensor,
    programs: int | None = None,
) -> None:
    """Write the rows that `at` names into y_SN, bfloat16; y_SN may be some columns of a matrix.

    w_ENK: contiguous, or the transpose of a contiguous (E, K, N).
    alpha_x: (S, 1), alpha_w: (E * N, 1), float32 and contiguous, or None.
    programs: how many run at once; by default one for each multiprocessor.
    """
    n, k = w_ENK.shape[1:]
    by_k = not w_ENK.is_contiguous()
    w_desc = described(w_ENK.transpose(1, 2), 1, TILE_K, TILE_N) if by_k else described(w_ENK, 1, TILE_N, TILE_K)
    _matmul_of(n, k, y_SN.stride(0), programs or multiprocessors(x_SK.device), by_k)(
        described(x_SK, TILE_M, TILE_K), w_desc, y_SN, alpha_x, alpha_w, *at
    )


@lru_cache(LAUNCHES)
def _matmul_of(n: int, k: int, y_row: int, programs: int, by_k: bool) -> Launch:
    return Launch(
        _matmul, (programs,), n=n, k=k, y_row=y_row, BM=TILE_M, BN=TILE_N, BK=TILE_K, GROUP=8, PROGRAMS=programs,
        BY_K=by_k, num_warps=8, num_stages=3, enable_fp_fusion=False,
    )  # fmt: skip


def zero_behind(y_SN: Tensor, ends: Tensor) -> None:
    """Zero the rows of y_SN, contiguous, that belong to no expert."""
    _zero_of(*y_SN.shape, ends.numel() - 1)(y_SN, ends)


@lru_cache(LAUNCHES)
def _zero_of(rows: int, n: int, last: int) -> Launch:
    return Launch(_zero_behind, (min(rows, 128),), rows=rows, n=n, last=last, B=1024)


def gathered_sum(rows_SK: Tensor, place_TJ: Tensor) -> Tensor:
    """(T, K): for each token the sum of the J rows that `place_TJ` names, in float32, rounded once."""
    (tokens, top), k = place_TJ.shape, rows_SK.shape[1]
    y_TK = rows_SK.new_empty(tokens, k)
    _sum_of(tokens, top, k)(rows_SK, place_TJ, y_TK)
    return y_TK


@lru_cache(LAUNCHES)
def _sum_of(tokens: int, top: int, k: int) -> Launch:
    width = min(triton.next_power_of_2(k), 2048)
    return Launch(_gathered_sum, (tokens, triton.cdiv(k, width)), k=k, TOP=top, B=width)
