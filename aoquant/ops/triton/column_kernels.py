"""A block of columns rounded one after another under given scales, each error moved to the columns behind it (GPTQ).

A program has 16 rows of up to 128 columns in registers, so the whole loop is one launch. It multiplies and adds apart
and divides correctly rounded, so its codes and errors are those of the loop in `ops/columns.py` on a CPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import on

ROWS = 16
TILE = 512  # levels of a program's rows in registers


@triton.jit
def _round_block(
    block_ptr, upper_ptr, column_ptr, level_ptr, code_ptr, values_ptr, codes_ptr, errors_ptr, n, wide, columns, levels,
    B: tl.constexpr, R: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """block, values, codes, errors: (E, columns, n). upper: (E, columns, columns). column: (E, columns), each column's
    number in the weight, of which `wide` share their levels. level, code: (groups, E * n, levels).
    """
    e = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * R + tl.arange(0, R)
    j, level = tl.arange(0, B), tl.arange(0, L)
    inside = row < n
    at = (e * columns + j)[:, None] * n + row[None, :]
    w = tl.load(block_ptr + at, mask=(j < columns)[:, None] & inside[None, :], other=0.0)
    rows = tl.num_programs(1).to(tl.int64) * n
    for i in range(columns):
        x = tl.sum(tl.where(j[:, None] == i, w, 0.0), 0)
        group = tl.load(column_ptr + e * columns + i) // wide
        place = ((group * rows + e * n + row) * levels)[:, None] + level[None, :]
        known = inside[:, None] & (level < levels)[None, :]
        below = tl.load(level_ptr + place, mask=known, other=float("inf"))
        above = tl.load(level_ptr + place + 1, mask=known & (level < levels - 1)[None, :], other=float("inf"))
        middle = tl.where(above == float("inf"), float("inf"), below * 0.5 + above * 0.5)
        index = tl.sum((middle < x[:, None]).to(tl.int32), 1)
        hit = level[None, :] == index[:, None]
        value = tl.sum(tl.where(hit, below.to(tl.int32, bitcast=True), 0), 1).to(tl.float32, bitcast=True)
        code = tl.sum(tl.where(hit, tl.load(code_ptr + place, mask=known, other=0).to(tl.int32), 0), 1)
        start = (e * columns + i) * columns
        over = tl.load(upper_ptr + start + i) + tl.zeros([R], tl.float32)
        error = tl.div_rn(x - value, over)
        u = tl.load(upper_ptr + start + j, mask=(j > i) & (j < columns), other=0.0)
        w = w - u[:, None] * error[None, :]
        out = (e * columns + i) * n + row
        tl.store(values_ptr + out, value, mask=inside)
        tl.store(codes_ptr + out, code.to(tl.uint8), mask=inside)
        tl.store(errors_ptr + out, error, mask=inside)


def round_block(
    block_EBN: Tensor, upper_EBB: Tensor, columns_EB: Tensor, values_GRL: Tensor, codes_GRL: Tensor, wide: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (values, codes, errors) of a block of columns, (E, B, N) each; see `columns.round_block`."""
    experts, columns, n = block_EBN.shape
    levels = values_GRL.shape[-1]
    size = triton.next_power_of_2(levels)
    rows = max(4, min(ROWS, TILE // size))
    values, errors = torch.empty_like(block_EBN), torch.empty_like(block_EBN)
    codes = torch.empty_like(block_EBN, dtype=torch.uint8)
    given = block_EBN.contiguous(), upper_EBB.contiguous(), columns_EB.contiguous(), values_GRL, codes_GRL
    with on(block_EBN):
        _round_block[(triton.cdiv(n, rows), experts)](
            *given, values, codes, errors, n, wide, columns, levels,
            B=triton.next_power_of_2(columns), R=rows, L=size, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return values, codes, errors
