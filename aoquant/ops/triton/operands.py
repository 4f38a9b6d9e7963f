"""The GEMM operands of x and of x^T in one pass over x: what both backward GEMMs multiply of dy, without codes.

dgrad reads dy (M, N) rounded in blocks along N, wgrad reads dy^T rounded in blocks along M. Where nothing keeps the
codes, a GEMM needs the values alone, and both lie where x lies: a matrix unit takes an operand (C, R) as well from the
memory of (R, C). So nothing is turned, and every read and write follows x's rows.

A program has strips of x, T columns of R rows, one block of the columns' format high. A lane holds whole blocks of its
columns, and neighbouring lanes share those along a row, so that scales cost a few exchanges within a warp. NVFP4's
outer scale is that of both sides: one pass finds it, where either needs it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from aoquant.formats import MX, Format, NVFP4Dialect
from aoquant.formats.blockscaled import NVFP4_TOP
from aoquant.formats.elements import ELEMENTS, FLOAT32_MAX
from aoquant.formats.scales import reciprocal

from ..router import CodesAndValues, Operands
from .amax import PARTIALS, absmax_partials
from .elements import (
    bits_float,
    e2m1_nearest,
    e8m0_byte,
    e8m0_inverse,
    e8m0_value,
    float_bits,
    least,
    most,
    te_factor,
    te_scale,
)
from .launch import PLANS, Launch

PROGRAMS = 2048
VALUES = 128  # of a lane: blocks of its columns, 16 or 32 high

# e2m1 takes longer to compute, and 128 values of a lane would spill
E2M1_PROGRAMS = 12 * 132  # all at once on an H100 or H200, which have 132 multiprocessors
E2M1_VALUES = 64
E2M1_REGISTERS = 168  # so that a multiprocessor holds 12 warps


@triton.jit
def _rounded(
    x, outer, factor, AXIS: tl.constexpr, ELEMENT: tl.constexpr, RULE: tl.constexpr, MAX_POW2: tl.constexpr,
    RECIPROCAL: tl.constexpr, MANTISSA: tl.constexpr, LIMIT: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """float32 values of the operand, from the bits x of float32 values whose blocks lie along AXIS. RULE: of an e8m0
    scale; "": te-nvfp4's, under `te_factor`'s factor.
    """
    magnitude = x & 0x7FFFFFFF
    amax = tl.max(magnitude, axis=AXIS, keep_dims=True)
    if RULE == "":
        scale, inverse = te_scale(amax, factor, RECIPROCAL, LARGEST)
        known = inverse == inverse  # else the block is +0, or NaN by its scale
        inverse, sign = tl.where(known, inverse, 0.0), tl.where(known, -0x80000000, 0)
        rounded = e2m1_nearest(bits_float(magnitude) * inverse)
        return bits_float(float_bits(rounded) | (x & sign)) * scale.to(tl.float32)
    else:
        byte = e8m0_byte(amax, RULE, MAX_POW2, RECIPROCAL, MANTISSA)
        inverse, scale = e8m0_inverse(byte, RULE), e8m0_value(byte)
        if ELEMENT == "e2m1":
            rounded = e2m1_nearest(bits_float(magnitude) * inverse)
            return bits_float(float_bits(rounded) | (x & -0x80000000)) * scale
        else:
            y = least(most(bits_float(x) * inverse, -LIMIT), LIMIT)
            code = y.to(tl.float8e4nv) if ELEMENT == "e4m3" else y.to(tl.float8e5)
            return code.to(tl.float32) * scale


@triton.jit
def _operands(
    x_ptr, partial_ptr, rows_ptr, columns_ptr, alpha_ptr, m, n, m_padded, n_padded,
    ROW_ELEMENT: tl.constexpr, ROW_RULE: tl.constexpr, ROW_MAX_POW2: tl.constexpr, ROW_RECIPROCAL: tl.constexpr,
    ROW_MANTISSA: tl.constexpr, ROW_LIMIT: tl.constexpr, ROW_BLOCK: tl.constexpr,
    COLUMN_ELEMENT: tl.constexpr, COLUMN_RULE: tl.constexpr, COLUMN_MAX_POW2: tl.constexpr,
    COLUMN_RECIPROCAL: tl.constexpr, COLUMN_MANTISSA: tl.constexpr, COLUMN_LIMIT: tl.constexpr,
    LARGEST: tl.constexpr, POST: tl.constexpr, N_PARTIALS: tl.constexpr, T: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """x (m, n) -> rows (m, n_padded) and columns (m_padded, n), zero behind x. alpha_ptr: for outer * POST, te-nvfp4's
    alpha, of either side; or None.
    """
    outer = tl.full([], 1.0, tl.float32)
    factor = outer
    if partial_ptr is not None:
        outer = bits_float(tl.max(tl.load(partial_ptr + tl.arange(0, N_PARTIALS)), axis=0))
        factor = te_factor(outer, LARGEST)
        if tl.program_id(0) == 0:
            tl.store(alpha_ptr, outer * POST)
    wide = tl.cdiv(n_padded, T)
    strips = wide * tl.cdiv(m_padded, R)
    for i in range(tl.program_id(0), strips, tl.num_programs(0)):
        strip = strips - 1 - i  # what a pass before read last is what the cache still holds
        row = strip // wide * R + tl.arange(0, R)[None, :]
        column = strip % wide * T + tl.arange(0, T)[:, None]
        first = tl.cast(row, tl.int64)
        x = tl.load(x_ptr + first * n + column, mask=(row < m) & (column < n), other=0.0)
        x = float_bits(x.to(tl.float32))
        if columns_ptr is not None:
            y = _rounded(
                x, outer, factor, 1, COLUMN_ELEMENT, COLUMN_RULE, COLUMN_MAX_POW2, COLUMN_RECIPROCAL, COLUMN_MANTISSA,
                COLUMN_LIMIT, LARGEST,
            )  # fmt: skip
            inside = (row < m_padded) & (column < n)
            tl.store(columns_ptr + first * n + column, y.to(columns_ptr.dtype.element_ty), mask=inside)
        if rows_ptr is not None:
            y = _rounded(
                tl.reshape(x, (T // ROW_BLOCK, ROW_BLOCK, R)), outer, factor, 1, ROW_ELEMENT, ROW_RULE, ROW_MAX_POW2,
                ROW_RECIPROCAL, ROW_MANTISSA, ROW_LIMIT, LARGEST,
            )  # fmt: skip
            y = tl.reshape(y, (T, R))
            inside = (row < m) & (column < n_padded)
            tl.store(rows_ptr + first * n_padded + column, y.to(rows_ptr.dtype.element_ty), mask=inside)


def _side(name: str, format: Format | None) -> dict[str, Any]:
    """The arguments of one side."""
    element, rule = "", ""
    if isinstance(format, MX):
        element, rule = format.element, format.rule
    elif isinstance(format, NVFP4Dialect):
        element = "e2m1"
    max_pow2, limit, mantissa = ELEMENTS[element or "e2m1"]
    return {
        f"{name}_ELEMENT": element, f"{name}_RULE": rule, f"{name}_MAX_POW2": max_pow2,
        f"{name}_RECIPROCAL": reciprocal(limit), f"{name}_MANTISSA": mantissa, f"{name}_LIMIT": limit,
    }  # fmt: skip


@lru_cache(PLANS)
def _launch(rows: Format | None, columns: Format | None, m: int, n: int, m_padded: int, n_padded: int) -> Launch:
    high = 16 if columns is None else columns.block or 16
    sides = _side("ROW", rows) | _side("COLUMN", columns)
    e2m1 = "e2m1" in (sides["ROW_ELEMENT"], sides["COLUMN_ELEMENT"])
    t = 32 * (E2M1_VALUES if e2m1 else VALUES) // high
    programs = min(triton.cdiv(n_padded, t) * triton.cdiv(m_padded, high), E2M1_PROGRAMS if e2m1 else PROGRAMS)
    return Launch(
        _operands, (programs,), m=m, n=n, m_padded=m_padded, n_padded=n_padded, **sides,
        ROW_BLOCK=16 if rows is None else rows.block, LARGEST=FLOAT32_MAX, POST=reciprocal(NVFP4_TOP),
        N_PARTIALS=PARTIALS, T=t, R=high, enable_fp_fusion=False, num_warps=1,
        **({"maxnreg": E2M1_REGISTERS} if e2m1 else {}),
    )  # fmt: skip


def operands(
    x_MN: Tensor, rows: Format | None, columns: Format | None, m_padded: int, n_padded: int, dtype: torch.dtype
) -> Operands:
    """The operands in `dtype` of a contiguous x, rounded as `rows` along N, and of x^T, as `columns` along M; None: not
    that one.

    m_padded, n_padded: the lengths of the contracted axes, with zeros.
    """
    (m, n), device = x_MN.shape, x_MN.device
    row_values = None if rows is None else torch.empty(m, n_padded, dtype=dtype, device=device)
    column_values = None if columns is None else torch.empty(m_padded, n, dtype=dtype, device=device)
    row_alpha, column_alpha = (isinstance(f, NVFP4Dialect) for f in (rows, columns))
    partials = alpha = None
    if row_alpha or column_alpha:
        partials, alpha = absmax_partials(x_MN), torch.empty(1, 1, dtype=torch.float32, device=device)
    _launch(rows, columns, m, n, m_padded, n_padded)(x_MN, partials, row_values, column_values, alpha)
    return Operands(
        None if row_values is None else CodesAndValues(None, row_values, alpha if row_alpha else None),
        None if column_values is None else CodesAndValues(None, column_values.t(), alpha if column_alpha else None),
    )
