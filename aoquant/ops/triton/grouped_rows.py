"""`few_rows.py` for experts: y = x W^T for few rows of x, sorted by expert, and packed 4-bit experts, in one launch.

A program has a slot (up to BM rows of one expert, see grouped.py), BN rows of that expert's W, and a range of K. It
finds its slot itself. There are as many programs as there could be slots, and a program without a slot ends at once. An
expert without rows costs nothing. If an expert has at most BM rows, its codes are read once. The sums of the ranges of
K go through memory, and a second kernel adds them in order. How K is cut depends on N, K and the range of S that
`splits` names, so within a range a row of y depends on that row and on its expert alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aoquant.formats import Encoded, Format

from .few_rows_kernels import BK, BN, LAUNCH, decoded_sums
from .grouped_kernels import slot_of

FEW = 32  # rows up to which K is cut for few experts


@triton.jit
def _partial(
    x_ptr, codes_ptr, scale_ptr, zero_ptr, ends_ptr, partial_ptr, s, n, k, experts, tiles_per_split,
    KIND: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, SHIFT: tl.constexpr, ODD_SHIFT: tl.constexpr,
    E: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Sums over one range of tiles along K: (splits, s, n) float32. WHOLE: the ranges fill K."""
    slot = tl.program_id(2)
    found, first, last, count = slot_of(ends_ptr, slot + tl.arange(0, 1), 0, experts, BM, E)
    if slot < count:
        expert, end = tl.sum(found), tl.sum(last)
        token = tl.sum(first) + tl.arange(0, BM)
        split = tl.program_id(1)
        row = tl.program_id(0) * BN + tl.arange(0, BN)
        in_expert = tl.minimum(row, n - 1).to(tl.int64)[:, None]
        expert_64 = expert.to(tl.int64)
        at_token = tl.minimum(token, end - 1).to(tl.int64)[:, None]
        acc = decoded_sums(
            x_ptr, codes_ptr, scale_ptr, zero_ptr, expert_64 * n + in_expert, expert_64 * (n // TILE) + in_expert // TILE, at_token,
            k, split * tiles_per_split, tiles_per_split, KIND, GROUP, SHIFT, ODD_SHIFT, BM, BN, BK, WHOLE,
        )  # fmt: skip
        at = (split * s + token).to(tl.int64)[None, :] * n + row[:, None]
        tl.store(partial_ptr + at, acc, mask=(row < n)[:, None] & (token < end)[None, :])


@triton.jit
def _finish(
    partial_ptr, ends_ptr, alpha_x_ptr, alpha_w_ptr, y_ptr, s, n, experts,
    E: tl.constexpr, SPLITS: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """rn(sum * alpha_x * alpha_w), the splits added in order; zero behind the last expert's rows."""
    row = tl.program_id(0)
    column = tl.program_id(1) * B + tl.arange(0, B)
    inside = column < n
    at = row.to(tl.int64) * n + column
    e = tl.arange(0, E)
    ends = tl.load(ends_ptr + e, mask=e < experts, other=0x7FFFFFFF)
    expert = tl.sum((ends <= row).to(tl.int32))
    y = tl.zeros([B], tl.float32)
    if expert < experts:
        y = tl.load(partial_ptr + at, mask=inside, other=0.0)
        for split in tl.static_range(1, SPLITS):
            y += tl.load(partial_ptr + at + tl.cast(s, tl.int64) * n * split, mask=inside, other=0.0)
        if alpha_x_ptr is not None:
            y = y * tl.load(alpha_x_ptr + row)
        if alpha_w_ptr is not None:
            y = y * tl.load(alpha_w_ptr + expert.to(tl.int64) * n + column, mask=inside, other=0.0)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


def splits(s: int, n: int, k: int, programs: int) -> int:
    """Tiles of K in a range, so that `programs` programs have work when S rows hit as many experts as they well may:
    8 up to `FEW` rows, then 32.
    """
    columns, tiles = triton.cdiv(n, BN), triton.cdiv(k, BK)
    ranges = max(1, min(programs // (columns * (8 if s <= FEW else 32)), tiles, 8))
    return triton.cdiv(tiles, ranges)


def decode_mm(
    format: Format,
    kind: str,
    w: Encoded,
    x_SK: Tensor,
    ends: Tensor,
    alpha_x: Tensor | None,
    alpha_w: Tensor | None,
    programs: int,
) -> Tensor:
    """(S, N) in x's dtype. w: experts' rows under each other, E * N. kind: that of
    ops/gemm/few_rows.py. ends: (E,) int32. alpha_x: (S, 1), alpha_w: (E * N, 1), float32 and contiguous,
    or None. programs: to have work for.
    """
    assert format.block is not None
    (s, k), experts = x_SK.shape, ends.numel()
    n = w.codes.shape[0] // experts
    per_split = splits(s, n, k, programs)
    ranges = triton.cdiv(triton.cdiv(k, BK), per_split)
    bm = 16 if s <= 4 * experts else 32
    slots = min(s, experts) + s // bm
    e = triton.next_power_of_2(experts)
    scale = w.scales.contiguous() if kind == "int4" else w.scales.contiguous().view(torch.uint8)
    partial = torch.empty(ranges, s, n, dtype=torch.float32, device=x_SK.device)
    _partial[(triton.cdiv(n, BN), ranges, slots)](
        x_SK.contiguous(), w.codes.contiguous(), scale, None if w.zero is None else w.zero.contiguous(), ends, partial, s, n, k,
        experts, per_split, KIND=kind, GROUP=format.block, TILE=format.tile_rows, SHIFT=format.shifts[0], ODD_SHIFT=format.shifts[1],
        E=e, BM=bm, BN=BN, BK=BK, WHOLE=k == ranges * per_split * BK, num_warps=4, num_stages=4, **LAUNCH,
    )  # fmt: skip
    y_SN = torch.empty(s, n, dtype=x_SK.dtype, device=x_SK.device)
    _finish[(s, triton.cdiv(n, 1024))](
        partial, ends, alpha_x, alpha_w, y_SN, s, n, experts, E=e, SPLITS=ranges, B=1024, **LAUNCH
    )
    return y_SN
