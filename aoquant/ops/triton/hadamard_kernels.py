"""The Hadamard transform in registers: `transforms.Hadamard`, bit for bit, before an encoder or by itself.

A lane holds whole blocks, so every butterfly is an addition of two registers of one lane, without shuffles and without
shared memory. A lane loads 16 bytes at a time, and the lanes of a warp work side by side on 32 blocks. The additions
are those of the reference, in its order. So a tile has 32 blocks for each warp (`WARP`); another shape gives the same
result, up to five times slower. The number of warps was measured: with 128 values in registers a second warp costs more
time than it hides.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from aoquant.transforms import Hadamard

from .element_codes import float_bits
from .launch import LAUNCHES, Launch

WARP = 32
ENCODE_WARPS = {16: 2, 32: 2, 64: 2, 128: 1}
AMAX_WARPS = {16: 8, 32: 4, 64: 2, 128: 2}


@triton.jit
def near(x, T: tl.constexpr, WIDTH: tl.constexpr, DISTANCE: tl.constexpr):
    """Butterflies within what a lane loads at once: (T, WIDTH) -> (T, WIDTH)."""
    a, b = tl.split(tl.permute(tl.reshape(x, (T, WIDTH // 2 // DISTANCE, 2, DISTANCE)), (0, 1, 3, 2)))
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), (T, WIDTH))


@triton.jit
def signs(BITS: tl.constexpr, WIDTH: tl.constexpr):
    """(1, WIDTH) float32: -1 where the bit is set."""
    return tl.where(((BITS >> tl.arange(0, WIDTH)) & 1) == 1, -1.0, 1.0)[None, :]


@triton.jit
def butterflies(
    x_ptr, origin, step, bits_ptr, word, inside,
    START: tl.constexpr, SIZE: tl.constexpr, SIGNS: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """(T, SIZE) float32: values START.. of T blocks, signed and mixed among themselves.

    origin: (T, 1), where a block begins, counted from x_ptr; its values are `step` apart. inside: (T, 1), which to
        load. bits_ptr: a bit for each value of blocks that lie side by side, 1 where it counts as zero; or None. Signs
        are SIGNS, or, when they are drawn, bits of word, (T, 1).
    """
    WIDTH: tl.constexpr = 4 if x_ptr.dtype.element_ty == tl.float32 else 8
    if SIZE == WIDTH:
        k = START + tl.arange(0, WIDTH)[None, :]
        x = tl.load(x_ptr + origin + k * step, mask=inside, other=0.0).to(tl.float32)
        if bits_ptr is not None:
            byte = tl.load(bits_ptr + origin // 8 + START // 8, mask=inside, other=0)
            x = tl.where(((byte.to(tl.int32) >> (k % 8)) & 1) == 1, 0.0, x)
        if word is not None:
            x = x * (1.0 - 2.0 * ((word >> k) & 1).to(tl.float32))
        elif (SIGNS >> START) & ((1 << WIDTH) - 1):
            x = x * signs((SIGNS >> START) & ((1 << WIDTH) - 1), WIDTH)
        x = near(near(x, T, WIDTH, 1), T, WIDTH, 2)
        return x if WIDTH == 4 else near(x, T, WIDTH, 4)
    else:
        a = butterflies(x_ptr, origin, step, bits_ptr, word, inside, START, SIZE // 2, SIGNS, T)
        b = butterflies(x_ptr, origin, step, bits_ptr, word, inside, START + SIZE // 2, SIZE // 2, SIGNS, T)
        return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), (T, SIZE))


@triton.jit
def beside(x_ptr, bits_ptr, inside, SIGNS: tl.constexpr, G: tl.constexpr, T: tl.constexpr):
    """(T, G) float32: T blocks of G that lie side by side from x_ptr on."""
    return butterflies(x_ptr, tl.arange(0, T)[:, None] * G, 1, bits_ptr, None, inside, 0, G, SIGNS, T)


@triton.jit
def _absmax(x_ptr, partial_ptr, n_groups, FACTOR: tl.constexpr, SIGNS: tl.constexpr, G: tl.constexpr, T: tl.constexpr):
    most = tl.zeros([T, G], tl.int32)
    for i in range(tl.program_id(0), tl.cdiv(n_groups, T), tl.num_programs(0)):
        tile = tl.cast(i, tl.int64)
        inside = (tile * T + tl.arange(0, T) < n_groups)[:, None]
        y = beside(x_ptr + tile * (T * G), None, inside, SIGNS, G, T) * FACTOR
        most = tl.maximum(most, float_bits(y) & 0x7FFFFFFF)
    tl.store(partial_ptr + tl.program_id(0), tl.max(tl.max(most, axis=1), axis=0))


# `rows` unspecialised: across memory a lane reads its own block's values, and not eight of neighbours' at once
@triton.jit(do_not_specialize=["rows"])
def _mix(
    x_ptr, bits_ptr, y_ptr, rows, k, n_groups,
    FACTOR: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr, G: tl.constexpr, T: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """BEFORE, AFTER: masks of signs. bits_ptr: what counts as zero. ACROSS: x lies in memory as (k, rows)."""
    tile = tl.program_id(0).to(tl.int64)
    if ACROSS:
        wide = tl.cdiv(rows, T)
        row, column = (tile % wide) * T, (tile // wide) * G
        t = tl.arange(0, T)[:, None]
        inside = row + t < rows
        y = butterflies(x_ptr + (column * rows + row), t, rows, None, None, inside, 0, G, BEFORE, T) * FACTOR
        y_ptr += row * k + column
        at = t * k + tl.arange(0, G)[None, :]
    else:
        inside = (tile * T + tl.arange(0, T) < n_groups)[:, None]
        if bits_ptr is not None:
            bits_ptr += tile * (T * G // 8)
        y = beside(x_ptr + tile * (T * G), bits_ptr, inside, BEFORE, G, T) * FACTOR
        y_ptr += tile * (T * G)
        at = tl.arange(0, T)[:, None] * G + tl.arange(0, G)[None, :]
    if AFTER:
        k = tl.arange(0, G)
        bits = tl.zeros([G], tl.int32)
        for word in tl.static_range(G // 16):
            bits = tl.where(k // 16 == word, ((AFTER >> (16 * word)) & 0xFFFF) >> (k % 16), bits)
        y = y * tl.where((bits & 1) == 1, -1.0, 1.0)[None, :]
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


def absmax_partials(x: Tensor, t: Hadamard, inverse: bool, partials: int) -> Tensor:
    """(partials,) int32: maxima of the bits of the transformed values' magnitudes. x is contiguous."""
    found = torch.empty(partials, dtype=torch.int32, device=x.device)
    _absmax_of(x.numel(), t, inverse, partials)(x, found)
    return found


@lru_cache(LAUNCHES)
def _absmax_of(n: int, t: Hadamard, inverse: bool, partials: int) -> Launch:
    warps = AMAX_WARPS[t.size]
    return Launch(
        _absmax, (partials,), n_groups=n // t.size, FACTOR=t.factor(inverse), SIGNS=t.signs, G=t.size, T=WARP * warps,
        enable_fp_fusion=False, num_warps=warps,
    )  # fmt: skip


@lru_cache(LAUNCHES)
def _mixer(rows: int, k: int, t: Hadamard, inverse: bool, back: bool, across: bool) -> Launch:
    tiles = triton.cdiv(rows, WARP) * (k // t.size) if across else triton.cdiv(rows * k // t.size, WARP)
    return Launch(
        _mix, (tiles,), rows=rows, k=k, n_groups=rows * k // t.size, FACTOR=t.factor(inverse), BEFORE=0 if back else t.signs,
        AFTER=t.signs if back else 0, G=t.size, T=WARP, ACROSS=across, enable_fp_fusion=False, num_warps=1,
    )  # fmt: skip


def mix(
    x: Tensor, t: Hadamard, inverse: bool, dtype: torch.dtype, *, back: bool = False, clipped: Tensor | None = None
) -> Tensor:
    """`t.apply(x, inverse)`, or back: `t.pull_back(x, inverse)`, rounded to `dtype`. clipped: bit-packed mask of values
    that count as zero.
    """
    across = clipped is None and x.dim() == 2 and x.t().is_contiguous() and not x.is_contiguous()
    x, y = x if across else x.contiguous(), torch.empty(x.shape, dtype=dtype, device=x.device)
    _mixer(x.numel() // x.shape[-1], x.shape[-1], t, inverse, back, across)(x, clipped, y)
    return y
