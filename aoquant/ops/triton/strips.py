"""Strips of a matrix in the registers of a warp, for `operands.py`: T columns of R rows, which lanes hold in two ways.

For the columns a lane holds all R rows of TALL columns: `strip`, or the whole strip side by side where TALL is 0. For
the rows it holds as much of a row as it loads at once, 8 values of bf16, so that few lanes share a block's scale:
`blocks`. Triton gives all accesses to tensors of one shape one layout, so `blocks` has three axes.

Philox's counters are laid out as a warp holds their values: the last axes are lanes, and the first axis is within a
lane. Otherwise the random words would change lanes through shared memory.

PLACE is the integer that counts the values of a matrix: int32 spares half of every address, and products of Philox.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .element_codes import most
from .hadamard_kernels import near, signs
from .stochastic_kernels import philox


@triton.jit
def strip(x_ptr, i, m, n, n_padded, PLACE: tl.constexpr, TALL: tl.constexpr, T: tl.constexpr, R: tl.constexpr):
    """Strip i: (T, R) float32, 0 outside of x, and where they lie: (1, R) rows and (T, 1) columns. TALL: a lane gets
    whole columns.
    """
    wide = tl.cdiv(n_padded, T)
    row = i // wide * R + tl.arange(0, R)[None, :]
    column = i % wide * T + tl.arange(0, T)[:, None]
    if TALL:  # loads no wider than a warp needs to reach along the strip
        column = tl.max_contiguous(column, [TALL, 1])
    at = tl.cast(row, PLACE) * n + column
    return tl.load(x_ptr + at, mask=(row < m) & (column < n), other=0.0).to(tl.float32), row, column


@triton.jit
def blocks(x_ptr, i, m, n, n_padded, PLACE: tl.constexpr, B: tl.constexpr, T: tl.constexpr, R: tl.constexpr):
    """`strip` as (T / B, B, R), the blocks along its rows: lanes get as much of a row as they load at once."""
    wide = tl.cdiv(n_padded, T)
    row = i // wide * R + tl.arange(0, R)[None, None, :]
    column = i % wide * T + tl.arange(0, T // B)[:, None, None] * B + tl.arange(0, B)[None, :, None]
    at = tl.cast(row, PLACE) * n + column
    return tl.load(x_ptr + at, mask=(row < m) & (column < n), other=0.0).to(tl.float32), row, column


@triton.jit
def row_words(key, i, n_padded, PLACE: tl.constexpr, B: tl.constexpr, T: tl.constexpr, R: tl.constexpr):
    """(T / B, B, R) int32: the words of a strip, of lanes that hold 8 values side by side."""
    WIDE: tl.constexpr = T // 8
    HIGH: tl.constexpr = 32 // WIDE  # rows of a warp
    own = tl.arange(0, 2 * R // HIGH)[:, None, None]
    wide = tl.cdiv(n_padded, T)
    row = i // wide * R + own // 2 * HIGH + tl.arange(0, HIGH)[None, :, None]
    four = i % wide * (T // 4) + tl.arange(0, WIDE)[None, None, :] * 2 + own % 2
    w0, w1, w2, w3 = philox(key, row.to(PLACE) * (n_padded // 4) + four)
    all = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (R // HIGH, 2, HIGH, WIDE, 4))
    return tl.reshape(tl.permute(all, (3, 1, 4, 0, 2)), (T // B, B, R)).to(tl.int32, bitcast=True)


@triton.jit
def column_words(key, i, m_padded, n_padded, PLACE: tl.constexpr, TALL: tl.constexpr, T: tl.constexpr, R: tl.constexpr):
    """(T, R) int32: the words of a strip's columns, of lanes that hold TALL whole ones."""
    own = tl.arange(0, TALL * R // 4)[:, None]
    wide = tl.cdiv(n_padded, T)
    column = i % wide * T + tl.arange(0, 32)[None, :] * TALL + own // (R // 4)
    four = i // wide * (R // 4) + own % (R // 4)
    w0, w1, w2, w3 = philox(key, column.to(PLACE) * (m_padded // 4) + four)
    all = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (TALL, R // 4, 32, 4))
    return tl.reshape(tl.permute(all, (2, 0, 1, 3)), (T, R)).to(tl.int32, bitcast=True)


@triton.jit
def mixed(x, DTYPE: tl.constexpr, SIGNS: tl.constexpr, T: tl.constexpr):
    """(T, 16) float32: each column transformed as `RoundedHadamard` does, in DTYPE."""
    return quartered(butterflied(x, SIGNS, T), DTYPE)


@triton.jit
def butterflied(x, SIGNS: tl.constexpr, T: tl.constexpr):
    """(T, 16) float32: four times the transformed columns, unrounded."""
    x = x * signs(SIGNS, 16)
    return near(near(near(near(x, T, 16, 1), T, 16, 2), T, 16, 4), T, 16, 8)


@triton.jit
def quartered(x, DTYPE: tl.constexpr):
    """A quarter of x, rounded to DTYPE, as float32."""
    return (x * 0.25).to(DTYPE).to(tl.float32)


@triton.jit
def highest(x):
    """float32: the largest magnitude along axis 1, which stays, of length 1; NaN where there is one."""
    return tl.reduce(tl.abs(x), 1, most, keep_dims=True)
