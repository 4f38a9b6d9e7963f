"""NVFP4 with an outer scale for each row, "nvfp4-row", in one pass: a program holds whole rows in registers.

The program finds the absmax of a row, makes its outer scale, and encodes the row out of the registers. So x is read
once, where one scale for the tensor takes two passes. A row longer than LONGEST, and one of many long ones
(row_width.py), is read twice. Blocks, scales and codes are those of blockscaled.py; only the outer scale comes from
another place.

A row is held in up to seven pieces, or in one that is as long or longer. Short rows share a program. Behind a
Hadamard transform a lane holds whole blocks of it (hadamard.py).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from aoquant.formats import NVFP4, Operand
from aoquant.formats.blockscaled import E4M3_FLOOR, NVFP4_TOP, PTS_FLOOR
from aoquant.formats.scales import reciprocal
from aoquant.transforms import Hadamard

from ..quantized import Ask, Side
from .blockscaled_kernels import TILE, Outputs, mixed, mixing, nvfp4_scale
from .element_codes import bits_float, e2m1_code, e2m1_sign, e2m1_value, e2m1_within, float_bits, most, store4
from .hadamard_kernels import WARP, butterflies
from .launch import LAUNCHES, Launch
from .row_width import row_width

LONGEST = 16384  # values of a row that a program holds at once
_PIECES = 7  # of a row that is held; more take too many registers
_WARPS = 8  # at most; of a transform's programs twice as many, which hold fewer values each


@triton.jit
def _blocks(
    x_ptr, rows, k, chunk, R: tl.constexpr, NB: tl.constexpr, B: tl.constexpr,
    G: tl.constexpr, SIGNS: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """(R * NB, B) int32: bits of the float32 values of blocks chunk * NB .. of each of R rows, transformed if G is not
    0; 0 outside.
    """
    if G:
        T: tl.constexpr = NB * B // G
        t = tl.arange(0, R * T)
        row, start = t // T, (chunk * T + t % T) * G
        inside = (row < rows) & (start < k)
        y = butterflies(x_ptr, (row * k + start)[:, None], 1, None, None, inside[:, None], 0, G, SIGNS, R * T)
        return float_bits(tl.reshape(y * FACTOR, (R * NB, B)))
    else:
        b = tl.arange(0, R * NB)
        row, start = b // NB, (chunk * NB + b % NB) * B
        inside = (row < rows) & (start < k)
        at = (row * k + start)[:, None] + tl.arange(0, B)[None, :]
        return float_bits(tl.load(x_ptr + at, mask=inside[:, None], other=0.0).to(tl.float32))


@triton.jit
def _encode_chunk(
    x, chunk, first, rows, groups, outer, inverse_outer, codes_ptr, scale_ptr, values_ptr,
    SIXTH: tl.constexpr, FLOOR: tl.constexpr, CODES: tl.constexpr, VALUES: tl.constexpr, R: tl.constexpr, NB: tl.constexpr,
    B: tl.constexpr,
):  # fmt: skip
    """Encode what `_blocks` returned, under the outer scale of each block's row."""
    b = tl.arange(0, R * NB)
    group = chunk * NB + b % NB
    inside = (b // NB < rows) & (group < groups)
    block = (first + b // NB) * groups + group
    magnitude = x & 0x7FFFFFFF
    scale, inverse = nvfp4_scale(tl.max(magnitude, axis=1), outer, inverse_outer, SIXTH, FLOOR)
    rounded, sign = e2m1_within(bits_float(magnitude) * inverse[:, None]), e2m1_sign(x, magnitude)
    if CODES:
        tl.store(scale_ptr + block, scale.to(tl.uint8, bitcast=True), mask=inside)
        codes = tl.where((inverse == inverse)[:, None], e2m1_code(rounded, sign), 0)
        word = (block * (B // 8))[:, None] + tl.arange(0, B // 8)[None, :]
        store4(codes_ptr, word, codes, inside[:, None], R * NB, B)
    if VALUES != "":
        scale_value = scale.to(tl.float32)
        if VALUES == "decode":
            scale_value = outer * scale_value
        at = (block * B)[:, None] + tl.arange(0, B)[None, :]
        value = e2m1_value(rounded, sign) * scale_value[:, None]
        tl.store(values_ptr + at, value.to(values_ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _encode_rows(
    x_ptr, codes_ptr, scale_ptr, outer_ptr, values_ptr, rows, groups,
    SIXTH: tl.constexpr, TOP_RECIPROCAL: tl.constexpr, FLOOR: tl.constexpr, SMALLEST: tl.constexpr,
    CODES: tl.constexpr, VALUES: tl.constexpr, CHUNKS: tl.constexpr, HELD: tl.constexpr, R: tl.constexpr, NB: tl.constexpr,
    B: tl.constexpr, G: tl.constexpr, SIGNS: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """R rows of `groups` blocks of B, NB blocks of each at a time. VALUES: "" none, "operand" without, "decode" with
    the outer scale.
    """
    k = groups * B
    first = tl.program_id(0).to(tl.int64) * R
    x_ptr += first * k
    rows = tl.minimum(rows - first, R).to(tl.int32)  # of this program
    largest = tl.zeros([R * NB], tl.int32)
    held = ()
    if HELD:
        for chunk in tl.static_range(CHUNKS):
            held += (_blocks(x_ptr, rows, k, chunk, R, NB, B, G, SIGNS, FACTOR),)  # type: ignore[assignment]
            largest = tl.maximum(largest, tl.max(held[chunk] & 0x7FFFFFFF, axis=1))
    else:
        for chunk in range(CHUNKS):
            x = _blocks(x_ptr, rows, k, chunk, R, NB, B, G, SIGNS, FACTOR)
            largest = tl.maximum(largest, tl.max(x & 0x7FFFFFFF, axis=1))
    outer = most(bits_float(tl.max(tl.reshape(largest, (R, NB)), axis=1)) * TOP_RECIPROCAL, SMALLEST)
    tl.store(outer_ptr + first + tl.arange(0, R), outer, mask=tl.arange(0, R) < rows)
    inverse_outer = tl.div_rn(tl.full([R], 1.0, tl.float32), outer)
    outer = tl.reshape(tl.broadcast_to(outer[:, None], (R, NB)), (R * NB,))
    inverse_outer = tl.reshape(tl.broadcast_to(inverse_outer[:, None], (R, NB)), (R * NB,))

    if HELD:
        for chunk in tl.static_range(CHUNKS):
            _encode_chunk(held[chunk], chunk, first, rows, groups, outer, inverse_outer, codes_ptr, scale_ptr, values_ptr,
                          SIXTH, FLOOR, CODES, VALUES, R, NB, B)  # fmt: skip
    else:
        for chunk in range(CHUNKS):
            x = _blocks(x_ptr, rows, k, chunk, R, NB, B, G, SIGNS, FACTOR)
            _encode_chunk(x, chunk, first, rows, groups, outer, inverse_outer, codes_ptr, scale_ptr, values_ptr,
                          SIXTH, FLOOR, CODES, VALUES, R, NB, B)  # fmt: skip


class _Tile(NamedTuple):
    """Hold how many values of a row, how many rows and how many warps a program takes at once, and whether it keeps
    the values that it read for the outer scale.
    """

    width: int
    height: int
    warps: int
    held: bool

    @classmethod
    def of(cls, rows: int, k: int, transform: Hadamard | None) -> _Tile:
        """Return the tile for rows of k."""
        if transform is not None:
            size = transform.size
            width = min(max(triton.next_power_of_2(k), size), LONGEST)
            height = max(1, WARP * size // width)
            return cls(width, height, max(1, min(height * width // size // WARP, 2 * _WARPS)), k <= width)
        for piece in (128, 256, 512, 1024):  # the first that is enough: no lane is idle, and each holds 8 values of it
            if k % piece == 0 and k // piece <= _PIECES:
                return cls(piece, max(1, 8 * WARP // piece), max(1, piece // (8 * WARP)), True)
        width = row_width(rows, k, LONGEST)
        height = max(1, TILE // width)
        return cls(width, height, max(1, min(height * width // TILE, _WARPS)), k <= width)


@lru_cache(LAUNCHES)
def _encoder(rows: int, k: int, codes: bool, values: str, transform: Hadamard | None, inverse: bool) -> Launch:
    tile = _Tile.of(rows, k, transform)
    return Launch(
        _encode_rows, (triton.cdiv(rows, tile.height),), rows=rows, groups=k // 16, SIXTH=reciprocal(6.0),
        TOP_RECIPROCAL=reciprocal(NVFP4_TOP), FLOOR=E4M3_FLOOR, SMALLEST=PTS_FLOOR, CODES=codes, VALUES=values,
        CHUNKS=triton.cdiv(k, tile.width), HELD=tile.held, R=tile.height, NB=tile.width // 16, B=16,
        **mixed(transform, inverse), enable_fp_fusion=False, num_warps=tile.warps,
    )  # fmt: skip


def encode(format: NVFP4, x_RK: Tensor, ask: Ask, mix: Operand | None) -> Side:
    """Make what `ask` asks for of x_RK, behind the Hadamard transform of `mix`, if it is not None, in the same pass;
    alpha is (R, 1).
    """
    transform, inverse = mixing(mix)
    assert format.outer == "row"
    x_RK = x_RK.contiguous()
    made, outer = Outputs.of(format, x_RK, ask), torch.empty(len(x_RK), 1, dtype=torch.float32, device=x_RK.device)
    launch = _encoder(*x_RK.shape, ask.codes, ask.form, transform, inverse)
    launch(x_RK, made.codes, made.scale, outer, made.values)
    return made.side(format, outer, outer)
