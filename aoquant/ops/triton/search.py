"""NVFP4 with searched block scales, as `formats/search.py` defines it. Decoding is NVFP4's, blockscaled.py's.

Errors are summed in order, k = 0..15, as the definition has it: one value and zeros add up to the value whatever order Triton adds them in, so
a column is picked by a mask and a sum.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from aoquant.formats import Encoded, NVFP4Search
from aoquant.formats.blockscaled import E4M3_FLOOR, PTS_FLOOR
from aoquant.formats.scales import reciprocal
from aoquant.formats.search import DOWN, HIGHEST, LOWEST, TOP, UP

from .amax import PARTIALS, absmax_partials
from .elements import INF_BITS, NAN_BITS, bits_float, e2m1_rounded, e2m1_value, float_bits, least, most, pack_e2m1

TILE = 512
LAUNCH: dict[str, Any] = {"enable_fp_fusion": False, "num_warps": 1}


@triton.jit
def _value(byte):
    return byte.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def _error(magnitude, y, scale, inverse, NB: tl.constexpr):
    """Of the codes under `scale`, in units of the outer scale."""
    index = float_bits(e2m1_rounded(magnitude * tl.div_rn(inverse + tl.zeros_like(scale), scale)[:, None]))
    lost = e2m1_value(index, tl.zeros_like(index)) * scale[:, None] - y
    squares = lost * lost
    k = tl.arange(0, 16)[None, :]
    total = tl.zeros([NB], tl.float32)
    for i in range(16):
        total = total + tl.sum(tl.where(k == i, squares, 0.0), axis=1)
    return total


@triton.jit
def _encode(
    x_ptr, partial_ptr, codes_ptr, scale_ptr, outer_ptr, values_ptr, n_blocks, pts,
    OUTER: tl.constexpr, SIXTH: tl.constexpr, TOP_RECIPROCAL: tl.constexpr, SMALLEST_PTS: tl.constexpr, FLOOR: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr,
    CODES: tl.constexpr, VALUES: tl.constexpr, NB: tl.constexpr, N_PARTIALS: tl.constexpr,
):  # fmt: skip
    """OUTER: "dynamic", "static", "none", or "measured": it is in outer_ptr. VALUES: "" none, "operand" without, "decode" with the outer scale."""
    outer = tl.full([], 1.0, tl.float32)
    if OUTER == "dynamic":
        largest = tl.max(tl.load(partial_ptr + tl.arange(0, N_PARTIALS)), axis=0)
        outer = most(bits_float(largest) * TOP_RECIPROCAL, SMALLEST_PTS)
    elif OUTER == "static":
        outer = pts + tl.zeros([], tl.float32)
    elif OUTER == "measured":
        outer = tl.load(outer_ptr)
    inverse = tl.div_rn(tl.full([], 1.0, tl.float32), outer)
    if (OUTER == "dynamic" or OUTER == "static") and tl.program_id(0) == 0:
        tl.store(outer_ptr, outer)

    tile = tl.program_id(0).to(tl.int64)
    block = tile * NB + tl.arange(0, NB)
    at = (tile * (NB * 16)) + (tl.arange(0, NB)[:, None] * 16 + tl.arange(0, 16)[None, :])
    inside = (block < n_blocks)[:, None]
    x = float_bits(tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32))
    magnitude = bits_float(x & 0x7FFFFFFF)
    y = magnitude * inverse
    amax = tl.max(x & 0x7FFFFFFF, axis=1)
    ratio = bits_float(tl.where(amax == INF_BITS, NAN_BITS, amax)) * SIXTH
    if OUTER != "none":
        ratio = tl.div_rn(ratio, outer + tl.zeros_like(ratio))
    usual = least(most(ratio, FLOOR), 448.0).to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
    best = usual
    smallest = _error(magnitude, y, _value(usual), inverse, NB)
    for offset in range(FIRST, LAST):
        byte = tl.minimum(tl.maximum(usual + offset, LEAST), MOST)
        error = _error(magnitude, y, _value(byte), inverse, NB)
        best = tl.where(error < smallest, byte, best)
        smallest = tl.where(error < smallest, error, smallest)

    scale = _value(best)
    scaled = magnitude * tl.div_rn(inverse + tl.zeros_like(scale), scale)[:, None]
    nan = scaled != scaled
    index = float_bits(e2m1_rounded(tl.where(nan, 0.0, scaled)))
    signed = tl.where(nan, 0, x)
    if CODES:
        tl.store(scale_ptr + block, best.to(tl.uint8), mask=block < n_blocks)
        half = (tile * (NB * 8)) + (tl.arange(0, NB)[:, None] * 8 + tl.arange(0, 8)[None, :])
        tl.store(codes_ptr + half, pack_e2m1(index, signed, NB, 16).to(tl.uint8), mask=inside)
    if VALUES != "":
        if VALUES == "decode" and OUTER != "none":
            scale = outer * scale
        value = e2m1_value(index, signed & -0x80000000) * scale[:, None]
        tl.store(values_ptr + at, value.to(values_ptr.dtype.element_ty), mask=inside)


def quantize(
    format: NVFP4Search,
    x_RK: Tensor,
    dtype: torch.dtype | None,
    operand: bool,
    keep: bool,
    measured: Tensor | None = None,
) -> tuple[Encoded | None, Tensor | None, Tensor | None]:
    """Encode x_RK: (codes and scales if `keep`, values in `dtype` unless it is None: `operand` or decoded, the operand's alpha).

    measured: the alpha that an earlier call gave for this very x_RK, which saves the pass that finds the outer scale.
    """
    x_RK = x_RK.contiguous()
    (rows, k), device = x_RK.shape, x_RK.device
    codes = torch.empty(rows, k // 2, dtype=torch.uint8, device=device) if keep else None
    scale = torch.empty(rows, k // 16, dtype=torch.uint8, device=device) if keep else None
    values = None if dtype is None else torch.empty(rows, k, dtype=dtype, device=device)
    kind, outer, partials = format.outer, None, None
    if kind == "dynamic" and measured is not None:
        kind, outer = "measured", measured
    elif kind != "none":
        outer = torch.empty(1, 1, dtype=torch.float32, device=device)
        partials = absmax_partials(x_RK) if kind == "dynamic" else None
    _encode[(triton.cdiv(rows * k, TILE),)](
        x_RK, partials, codes, scale, outer, values, rows * k // 16,
        format.pts or 0.0, OUTER=kind, SIXTH=reciprocal(6.0), TOP_RECIPROCAL=reciprocal(TOP), SMALLEST_PTS=PTS_FLOOR,
        FLOOR=E4M3_FLOOR, FIRST=-DOWN, LAST=UP + 1, LEAST=LOWEST, MOST=HIGHEST, CODES=keep,
        VALUES="" if dtype is None else "operand" if operand else "decode", NB=TILE // 16, N_PARTIALS=PARTIALS, **LAUNCH,
    )  # fmt: skip
    if codes is None or scale is None:
        return None, values, outer
    return Encoded(codes, scale.view(torch.float8_e4m3fn), None, outer, k), values, outer
