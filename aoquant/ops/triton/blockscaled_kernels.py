"""MX and NVFP4 in one pass: read x once, write codes and scales, and the values that a GEMM will multiply, as asked.

A contiguous (R, K) matrix whose blocks divide K is a stream of blocks, and codes, scales and values are streams in the
same order, so the kernels are one-dimensional. NVFP4's dynamic outer scale needs an absmax of the whole tensor first:
`amax.absmax_partials` leaves one per program, and every program of the encoder takes their maximum. The encoder then
walks backwards, because what the first pass read last is what the L2 cache still holds.

A transposed view of a contiguous matrix is read where it lies, a tile at a time, and turned in shared memory: backward
encodes x, W and dy along their other axis, and a copy of each would cost as much as the encoding.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from aoquant.formats import MX, NVFP4, Encoded, MXFP4Dialect, NVFP4Dialect, Operand
from aoquant.formats.blockscaled import E4M3_FLOOR, NVFP4_TOP, PTS_FLOOR
from aoquant.formats.elements import ELEMENTS, FLOAT8
from aoquant.formats.scales import reciprocal
from aoquant.transforms import Hadamard

from ..native import aligned
from ..quantized import Ask, Side
from .amax_kernels import PARTIALS, absmax_partials
from .element_codes import (
    INF_BITS,
    NAN_BITS,
    bits_float,
    e2m1_code,
    e2m1_code_alone,
    e2m1_rounded,
    e2m1_sign,
    e2m1_value,
    e8m0_byte,
    e8m0_inverse,
    e8m0_value,
    float8_code,
    float_bits,
    least,
    load_e2m1,
    most,
    row_and_column,
    store4,
)
from .hadamard_kernels import ENCODE_WARPS, WARP, beside
from .hadamard_kernels import absmax_partials as mixed_partials
from .launch import LAUNCHES, Launch

TILE = 1024  # values a program holds at once: one warp of them, so that nothing waits at a barrier
MANY = 1 << 22  # values, whose decoders need not be as many as can be
LAUNCH: dict[str, Any] = {"enable_fp_fusion": False, "num_warps": 1}
Blockscaled = MX | NVFP4 | MXFP4Dialect | NVFP4Dialect


@triton.jit
def blocks_of(tile, n_blocks, rows, k, NB: tl.constexpr, B: tl.constexpr, ACROSS: tl.constexpr):
    """(NB,) blocks of a tile, counted in the whole matrix, and whether each is there.

    ACROSS: rows of a tile whose blocks lie across memory, one of each, or 0: then a tile's blocks follow each other.
    """
    b = tl.arange(0, NB)
    if ACROSS:
        wide = tl.cdiv(rows, ACROSS)
        row = (tile % wide) * ACROSS + b
        return row * (k // B) + tile // wide, row < rows
    else:
        return tile * NB + b, tile * NB + b < n_blocks


@triton.jit
def within(tile, block, NB: tl.constexpr, SIZE: tl.constexpr, ACROSS: tl.constexpr):
    """(NB, SIZE): the places of what a tile's blocks are stored in, SIZE elements each."""
    if ACROSS:
        return block[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    else:
        return (tile * (NB * SIZE)) + (tl.arange(0, NB)[:, None] * SIZE + tl.arange(0, SIZE)[None, :])


@triton.jit
def load_blocks(
    x_ptr, tile, n_blocks, rows, k, NB: tl.constexpr, B: tl.constexpr, G: tl.constexpr, SIGNS: tl.constexpr,
    FACTOR: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """(NB, B) int32: bits of the float32 values of a tile's blocks, transformed in blocks of G if that is not 0; 0
    behind the last block. ACROSS: the memory of x is that of its transpose, (k, rows).
    """
    if ACROSS:
        wide = tl.cdiv(rows, ACROSS)
        row = (tile % wide) * ACROSS + tl.arange(0, ACROSS)
        column = (tile // wide) * B + tl.arange(0, B)
        x = tl.load(x_ptr + column[None, :] * rows + row[:, None], mask=(row < rows)[:, None], other=0.0)
        return float_bits(x.to(tl.float32))
    elif G:
        T: tl.constexpr = NB * B // G
        whole = (tile * T + tl.arange(0, T) < tl.cast(n_blocks, tl.int64) * B // G)[:, None]
        y = beside(x_ptr + tile * (NB * B), None, whole, SIGNS, G, T) * FACTOR
        return float_bits(tl.reshape(y, (NB, B)))
    else:
        inside = (tile * NB + tl.arange(0, NB) < n_blocks)[:, None]
        at = (tile * (NB * B)) + (tl.arange(0, NB)[:, None] * B + tl.arange(0, B)[None, :])
        return float_bits(tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32))


@triton.jit
def nvfp4_scale(amax_bits, pts, inverse_pts, SIXTH: tl.constexpr, FLOOR: tl.constexpr):
    """amax of each block -> (e4m3 scale, what x is multiplied by). pts, inverse_pts: one for all, or one a block; pts
    may be None.
    """
    amax = bits_float(tl.where(amax_bits == INF_BITS, NAN_BITS, amax_bits))
    ratio = amax * SIXTH
    if pts is not None:
        ratio = tl.div_rn(ratio, pts + tl.zeros_like(ratio))
    ratio = most(ratio, FLOOR)
    scale = least(ratio, 448.0).to(tl.float8e4nv)
    return scale, tl.div_rn(inverse_pts + tl.zeros_like(ratio), scale.to(tl.float32))


@triton.jit
def power_at_or_above(v):
    """The power of two at or above a positive normal float; Inf and NaN stay."""
    bits = float_bits(v)
    return bits_float(tl.where(bits < INF_BITS, (bits + 0x7FFFFF) & 0x7F800000, bits))


# `rows` unspecialised: across memory a lane reads its own blocks' values, and not eight of neighbours' at once
@triton.jit(do_not_specialize=["rows"])
def _encode(
    x_ptr, partial_ptr, codes_ptr, scale_ptr, outer_ptr, values_ptr, n_blocks, rows, k, outer_blocks, pts,
    OUTER: tl.constexpr, POWER: tl.constexpr, RULE: tl.constexpr, MAX_POW2: tl.constexpr, RECIPROCAL: tl.constexpr, MANTISSA: tl.constexpr,
    LIMIT: tl.constexpr, ELEMENT: tl.constexpr, PTS_RECIPROCAL: tl.constexpr, FLOOR: tl.constexpr, SMALLEST_PTS: tl.constexpr,
    CODES: tl.constexpr, VALUES: tl.constexpr, NB: tl.constexpr, B: tl.constexpr, N_PARTIALS: tl.constexpr,
    G: tl.constexpr, SIGNS: tl.constexpr, FACTOR: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """OUTER: "" for MX, else NVFP4's, or "measured": it is in outer_ptr, or "stacked": there is one for every
    `outer_blocks` blocks. POWER: whether a dynamic one is a power of two. VALUES: "" none, "operand" without, "decode"
    with the outer scale.

    G: of a Hadamard transform, or 0. ACROSS: as in `blocks_of`, over (rows, k).
    """
    outer = None
    inverse_pts = 1.0
    if OUTER == "dynamic":
        largest = tl.max(tl.load(partial_ptr + tl.arange(0, N_PARTIALS)), axis=0)
        outer = most(bits_float(largest) * PTS_RECIPROCAL, SMALLEST_PTS)
        if POWER:
            outer = power_at_or_above(outer)
    elif OUTER == "static":
        outer = pts + tl.zeros([], tl.float32)
    elif OUTER == "measured":
        outer = tl.load(outer_ptr)
    if outer is not None:
        inverse_pts = tl.div_rn(tl.full([], 1.0, tl.float32), outer)
    if OUTER == "dynamic" or OUTER == "static":
        tl.store(outer_ptr, outer, mask=tl.program_id(0) == 0)

    n_tiles = tl.cdiv(rows, ACROSS) * (k // B) if ACROSS else tl.cdiv(n_blocks, NB)
    for i in range(tl.program_id(0), n_tiles, tl.num_programs(0)):
        tile = tl.cast(n_tiles - 1 - i, tl.int64)
        block, there = blocks_of(tile, n_blocks, rows, k, NB, B, ACROSS)
        at = within(tile, block, NB, B, ACROSS)
        inside = there[:, None]
        x = load_blocks(x_ptr, tile, n_blocks, rows, k, NB, B, G, SIGNS, FACTOR, ACROSS)
        magnitude = x & 0x7FFFFFFF
        amax = tl.max(magnitude, axis=1)
        if OUTER == "":
            byte = e8m0_byte(amax, RULE, MAX_POW2, RECIPROCAL, MANTISSA)
            inverse, scale_value = e8m0_inverse(byte, RULE), e8m0_value(byte)
            if CODES:
                tl.store(scale_ptr + block, byte.to(tl.uint8), mask=there)
        else:
            if OUTER == "stacked":
                above = tl.load(outer_ptr + block // outer_blocks, mask=there, other=1.0)
                inverse_above = tl.div_rn(tl.full([NB], 1.0, tl.float32), above)
                scale, inverse = nvfp4_scale(amax, above, inverse_above, RECIPROCAL, FLOOR)
            else:
                scale, inverse = nvfp4_scale(amax, outer, inverse_pts, RECIPROCAL, FLOOR)
            scale_value = scale.to(tl.float32)
            if CODES:
                tl.store(scale_ptr + block, scale.to(tl.uint8, bitcast=True), mask=there)
            if VALUES == "decode" and OUTER == "stacked":
                scale_value = above * scale_value
            elif VALUES == "decode" and outer is not None:
                scale_value = outer * scale_value

        if ELEMENT == "e2m1":
            rounded, sign = e2m1_rounded(bits_float(magnitude) * inverse[:, None]), e2m1_sign(x, magnitude)
            if CODES:
                codes = e2m1_code_alone(rounded, x) if VALUES == "" else e2m1_code(rounded, sign)
                codes = tl.where((inverse == inverse)[:, None], codes, 0)  # NaN has no code, and no sign
                store4(codes_ptr, within(tile, block, NB, B // 8, ACROSS), codes, inside, NB, B)
            if VALUES != "":
                value = e2m1_value(rounded, sign)
        else:
            code = float8_code(bits_float(x) * inverse[:, None], LIMIT, ELEMENT)
            if CODES:
                tl.store(codes_ptr + at, code.to(tl.uint8, bitcast=True), mask=inside)
            if VALUES != "":
                value = code.to(tl.float32)
        if VALUES != "":
            value = value * scale_value[:, None]
            tl.store(values_ptr + at, value.to(values_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _decode(
    codes_ptr, scale_ptr, outer_ptr, values_ptr, n_blocks, OUTER: tl.constexpr, BLOCKS_PER_ROW: tl.constexpr,
    ELEMENT: tl.constexpr, MX_SCALE: tl.constexpr, POST: tl.constexpr, NB: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Decode NB blocks. OUTER: whether there are outer scales, one in all ("one") or one a row ("row"); or "". POST:
    multiplies last.
    """
    tile = tl.program_id(0).to(tl.int64)
    block = tile * NB + tl.arange(0, NB)
    at = (tile * (NB * B)) + (tl.arange(0, NB)[:, None] * B + tl.arange(0, B)[None, :])
    inside = block < n_blocks
    byte = tl.load(scale_ptr + block, mask=inside, other=0)
    scale = e8m0_value(byte.to(tl.int32)) if MX_SCALE else byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    if OUTER == "one":
        scale = tl.load(outer_ptr) * scale
    elif OUTER == "row":
        row, _ = row_and_column(tile * NB, tl.arange(0, NB), BLOCKS_PER_ROW)
        scale = tl.load(outer_ptr + row, mask=inside, other=0.0) * scale
    scale = scale * POST
    if ELEMENT == "e2m1":
        word = (tile * (NB * B // 8)) + (tl.arange(0, NB)[:, None] * (B // 8) + tl.arange(0, B // 8)[None, :])
        value = load_e2m1(codes_ptr, word, inside[:, None], NB, B)
    else:
        code = tl.load(codes_ptr + at, mask=inside[:, None], other=0)
        code = code.to(tl.float8e4nv, bitcast=True) if ELEMENT == "e4m3" else code.to(tl.float8e5, bitcast=True)
        value = code.to(tl.float32)
    tl.store(values_ptr + at, (value * scale[:, None]).to(values_ptr.dtype.element_ty), mask=inside[:, None])


@lru_cache(LAUNCHES)
def _encoder(
    format: MX | NVFP4,
    rows: int,
    k: int,
    outer: str,
    codes: bool,
    values: str,
    transform: Hadamard | None,
    inverse: bool,
    across: bool,
    outers: int = 1,
) -> Launch:
    grid, common = frame(format, rows, k, transform, inverse, across)
    element, of = format.element, ELEMENTS[format.element]
    return Launch(
        _encode, grid, outer_blocks=rows // outers * k // format.block, pts=format.fixed[0] if format.fixed else 0.0,
        OUTER=outer, POWER=format.power_of_two, RULE=format.rule, MAX_POW2=of.max_pow2, RECIPROCAL=reciprocal(of.largest),
        MANTISSA=of.mantissa, LIMIT=of.largest, ELEMENT=element, PTS_RECIPROCAL=reciprocal(NVFP4_TOP), FLOOR=E4M3_FLOOR,
        SMALLEST_PTS=PTS_FLOOR, CODES=codes, VALUES=values, **common,
    )  # fmt: skip


def frame(
    format: Blockscaled, rows: int, k: int, transform: Hadamard | None, inverse: bool, across: bool
) -> tuple[tuple[int], dict[str, Any]]:
    """(the grid, the arguments of every encoder of blocks)."""
    warps = 1 if transform is None else ENCODE_WARPS[transform.size]
    tile = TILE if transform is None else WARP * warps * transform.size  # a block of the transform for each lane
    high = TILE // format.block if across else 0
    programs = triton.cdiv(rows, high) * (k // format.block) if across else triton.cdiv(rows * k, tile)
    return (programs,), {
        "n_blocks": rows * k // format.block, "rows": rows, "k": k, "ACROSS": high, "NB": tile // format.block,
        "B": format.block, "N_PARTIALS": PARTIALS, **mixed(transform, inverse), **LAUNCH, "num_warps": warps,
    }  # fmt: skip


def mixed(transform: Hadamard | None, inverse: bool) -> dict[str, Any]:
    """The arguments that say which transform an encoder applies first."""
    if transform is None:
        return {"G": 0, "SIGNS": 0, "FACTOR": 1.0}
    return {"G": transform.size, "SIGNS": transform.signs, "FACTOR": transform.factor(inverse)}


def memory(x_RK: Tensor) -> tuple[Tensor, bool]:
    """(x_RK, whether its memory is that of its transpose); copied if it is neither contiguous nor that."""
    across = x_RK.t().is_contiguous() and not x_RK.is_contiguous()
    return (x_RK if across else x_RK.contiguous()), across


def mixing(mix: Operand | None) -> tuple[Hadamard | None, bool]:
    """The Hadamard transform in front of the encoder, and whether it is the weight's side."""
    return (None, False) if mix is None else (mix.transform, mix.inverse)  # type: ignore[return-value]


class Outputs(NamedTuple):
    """Hold where an encoder writes codes (R, bytes) and scales of blocks, both as bytes, and values (R, K); None: not
    those.
    """

    codes: Tensor | None
    scale: Tensor | None
    values: Tensor | None

    @classmethod
    def of(cls, format: Any, x_RK: Tensor, ask: Ask) -> Outputs:
        """Return memory for what `ask` asks for of x in a format with scales of one byte."""
        (rows, k), device, codes, scale = x_RK.shape, x_RK.device, None, None
        values = None if ask.values is None else torch.empty(rows, k, dtype=ask.values, device=device)
        if ask.codes:
            codes = torch.empty(rows, k * format.bits // 8, dtype=torch.uint8, device=device)
            scale = torch.empty(-(-rows // format.tile_rows), k // format.block, dtype=torch.uint8, device=device)
        return cls(codes, scale, values)

    def side(self, format: Any, outer: Tensor | None, alpha: Tensor | None) -> Side:
        """Return what was written, as codes of `format` under an outer scale, and the operand's alpha."""
        if self.codes is None or self.scale is None:
            return Side(None, self.values, alpha)
        codes = self.codes if format.bits == 4 else self.codes.view(FLOAT8[format.element])
        k = format.block * self.scale.shape[1]
        return Side(Encoded(codes, self.scale.view(format.block_scale), None, outer, k), self.values, alpha)


def encode(format: MX | NVFP4, x_RK: Tensor, ask: Ask, mix: Operand | None) -> Side:
    """Make what `ask` asks for of x_RK, behind the Hadamard transform of `mix`, if it is not None, in the same pass.

    ask.measured: the alpha that an earlier call gave for this very x_RK, which saves the pass that finds NVFP4's outer
        scale; or those (E, 1) of E matrices that are stacked in x_RK, rows under rows.
    """
    transform, inverse = mixing(mix)
    x_RK, across = memory(x_RK) if transform is None else (x_RK.contiguous(), False)
    made, measured = Outputs.of(format, x_RK, ask), ask.measured
    outer = partials = None
    kind = format.outer
    outers = 1 if measured is None else measured.numel()
    if kind == "dynamic" and measured is not None:
        kind, outer = "measured" if outers == 1 else "stacked", measured
    elif kind not in ("", "none"):
        outer = torch.empty(1, 1, dtype=torch.float32, device=x_RK.device)
        if kind == "dynamic" and transform is None:
            partials = absmax_partials(x_RK.t() if across else x_RK)
        elif kind == "dynamic" and transform is not None:
            partials = mixed_partials(x_RK, transform, inverse, PARTIALS)
    launch = _encoder(format, *x_RK.shape, kind, ask.codes, ask.form, transform, inverse, across, outers)
    launch(x_RK, partials, made.codes, made.scale, outer, made.values)
    return made.side(format, outer, outer)


@lru_cache(LAUNCHES)
def _decoder(format: Blockscaled, rows: int, k: int, outer_rows: int, post: float) -> Launch:
    tile, warps = (4 * TILE, 2) if rows * k >= MANY else (TILE, 1)
    return Launch(
        _decode, (triton.cdiv(rows * k, tile),),
        n_blocks=rows * k // format.block, OUTER=("", "one", "row")[min(outer_rows, 2)], BLOCKS_PER_ROW=k // format.block,
        ELEMENT=format.element, MX_SCALE=format.block_scale == torch.float8_e8m0fnu,
        POST=post, NB=tile // format.block, B=format.block, **LAUNCH | {"num_warps": warps},
    )  # fmt: skip


def decode(format: Blockscaled, e: Encoded, dtype: torch.dtype, operand: bool, post: float = 1.0) -> Tensor:
    """(R, K) values in `dtype`: the operand, or decoded. post: multiplies the scales last."""
    rows = e.codes.shape[0]
    values = torch.empty(rows, e.k, dtype=dtype, device=e.codes.device)
    outer = None if operand else e.outer
    codes, scale = aligned(e.codes).view(torch.uint8), e.scales.contiguous().view(torch.uint8)
    _decoder(format, rows, e.k, 0 if outer is None else outer.shape[0], post)(codes, scale, outer, values)
    return values
