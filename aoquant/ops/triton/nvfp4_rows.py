"""NVFP4 with an outer scale for each row, "nvfp4-row", in one pass: a program holds whole rows in registers.

The program finds the absmax of a row, makes its outer scale, and encodes the row out of the registers. So x is read
once, where one scale for the tensor takes two passes. A row longer than LONGEST, and one of many long ones
(row_width.py), is read twice. Blocks, scales and codes are those of blockscaled.py;
only the outer scale comes from another place.

Short rows share a program, as many as make a tile of one warp. Behind a Hadamard transform a lane holds whole blocks of
it (hadamard.py).
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from aoquant.formats import NVFP4, Operand
from aoquant.formats.blockscaled import E4M3_FLOOR, NVFP4_TOP, PTS_FLOOR
from aoquant.formats.scales import reciprocal
from aoquant.transforms import Hadamard

from ..quantized import Ask, Side
from .blockscaled_kernels import TILE, Outputs, masked_codes, mixed, mixing, nvfp4_scale
from .element_codes import bits_float, e2m1_rounded, e2m1_value, float_bits, most
from .hadamard_kernels import WARP, butterflies
from .launch import LAUNCHES, Launch
from .row_width import row_width

LONGEST = 16384  # values of a row that a program holds at once
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
def _encode_rows(
    x_ptr, codes_ptr, scale_ptr, outer_ptr, values_ptr, rows, groups,
    SIXTH: tl.constexpr, TOP_RECIPROCAL: tl.constexpr, FLOOR: tl.constexpr, SMALLEST: tl.constexpr,
    CODES: tl.constexpr, VALUES: tl.constexpr, CHUNKS: tl.constexpr, R: tl.constexpr, NB: tl.constexpr, B: tl.constexpr,
    G: tl.constexpr, SIGNS: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """R rows of `groups` blocks of B, NB blocks of each at a time. VALUES: "" none, "operand" without, "decode" with
    the outer scale.
    """
    k = groups * B
    first = tl.program_id(0).to(tl.int64) * R
    x_ptr += first * k
    rows = tl.minimum(rows - first, R).to(tl.int32)  # of this program
    if CHUNKS == 1:
        x = _blocks(x_ptr, rows, k, 0, R, NB, B, G, SIGNS, FACTOR)
        largest = tl.max(x & 0x7FFFFFFF, axis=1)
    else:
        largest = tl.zeros([R * NB], tl.int32)
        for chunk in range(CHUNKS):
            x = _blocks(x_ptr, rows, k, chunk, R, NB, B, G, SIGNS, FACTOR)
            largest = tl.maximum(largest, tl.max(x & 0x7FFFFFFF, axis=1))
    outer = most(bits_float(tl.max(tl.reshape(largest, (R, NB)), axis=1)) * TOP_RECIPROCAL, SMALLEST)
    tl.store(outer_ptr + first + tl.arange(0, R), outer, mask=tl.arange(0, R) < rows)
    inverse_outer = tl.div_rn(tl.full([R], 1.0, tl.float32), outer)
    outer = tl.reshape(tl.broadcast_to(outer[:, None], (R, NB)), (R * NB,))
    inverse_outer = tl.reshape(tl.broadcast_to(inverse_outer[:, None], (R, NB)), (R * NB,))

    b = tl.arange(0, R * NB)
    for chunk in range(CHUNKS):
        if CHUNKS > 1:
            x = _blocks(x_ptr, rows, k, chunk, R, NB, B, G, SIGNS, FACTOR)
        group = chunk * NB + b % NB
        inside = (b // NB < rows) & (group < groups)
        block = (first + b // NB) * groups + group
        magnitude = x & 0x7FFFFFFF
        scale, inverse = nvfp4_scale(tl.max(magnitude, axis=1), outer, inverse_outer, SIXTH, FLOOR)
        rounded = e2m1_rounded(bits_float(magnitude) * inverse[:, None])
        if CODES:
            tl.store(scale_ptr + block, scale.to(tl.uint8, bitcast=True), mask=inside)
            half = (block * (B // 2))[:, None] + tl.arange(0, B // 2)[None, :]
            tl.store(codes_ptr + half, masked_codes(rounded, x, inverse, R * NB, B), mask=inside[:, None])
        if VALUES != "":
            scale_value = scale.to(tl.float32)
            if VALUES == "decode":
                scale_value = outer * scale_value
            value = e2m1_value(float_bits(rounded), x ^ magnitude) * scale_value[:, None]
            at = (block * B)[:, None] + tl.arange(0, B)[None, :]
            tl.store(values_ptr + at, value.to(values_ptr.dtype.element_ty), mask=inside[:, None])


@lru_cache(LAUNCHES)
def _encoder(rows: int, k: int, codes: bool, values: str, transform: Hadamard | None, inverse: bool) -> Launch:
    size = 0 if transform is None else transform.size
    width = row_width(rows, k, LONGEST) if transform is None else min(max(triton.next_power_of_2(k), size), LONGEST)
    height = max(1, TILE // width if transform is None else WARP * size // width)
    warps = height * width // TILE if transform is None else height * width // size // WARP
    return Launch(
        _encode_rows, (triton.cdiv(rows, height),), rows=rows, groups=k // 16, SIXTH=reciprocal(6.0), TOP_RECIPROCAL=reciprocal(NVFP4_TOP),
        FLOOR=E4M3_FLOOR, SMALLEST=PTS_FLOOR, CODES=codes, VALUES=values, CHUNKS=triton.cdiv(k, width), R=height, NB=width // 16, B=16,
        **mixed(transform, inverse), enable_fp_fusion=False, num_warps=max(1, min(warps, _WARPS if transform is None else 2 * _WARPS)),
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
