"""Int4 (MSLK's dialect), torchao's affine integers and vLLM's int8 rows, encoded and decoded in one pass each.

A row is taken as a block of K values, so one kernel serves scales per group, per row and, with the range of the whole
tensor given by a first pass, per tensor. torchao's formulas round every step to the input's dtype (`through`), so
scales of bfloat16 weights are the same on every device. Int4's operand is q * s + z in one rounding: as in
`formats.elements.fma_round`, the float32 sum is rounded to odd first.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from aoquant.formats import Affine, Encoded, Format, Int4, Operand
from aoquant.formats.scales import reciprocal
from aoquant.formats.vllm import Int8Vllm, Int8VllmReciprocal

from ..quantized import Ask, Side
from .amax_kernels import PARTIALS, range_partials
from .element_codes import ROUND, ROUND_SIGNED, float_bits, least, most, pack4, quotient, round_even, through, unpack4
from .launch import LAUNCHES, Launch

NO_FUSION = {"enable_fp_fusion": False}
TILE = 1024  # values a warp holds
# what multiplies x
_FACTOR_OF: dict[type[Format], str] = {Int8Vllm: "127 / amax", Int8VllmReciprocal: "1 / scale"}
TL_DTYPE = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def _int4_values(q, s, z, FUSED: tl.constexpr, OUT: tl.constexpr):
    """q * s + z: a multiply-add of type FUSED, then OUT; FUSED None: rounded once to OUT, by no single instruction."""
    if FUSED is not None:
        return tl.fma(q.to(FUSED), s.to(FUSED), z.to(FUSED)).to(OUT)
    product = q * s  # exact
    total = product + z
    shadow = total - product
    error = (product - (total - shadow)) + (z - shadow)
    bits = float_bits(total)
    # to odd: the neighbour towards the error; for an even number that is one bit up or down, by the signs of both
    away = tl.where((error > 0) == (bits >= 0), 1, -1)
    inexact = (error != 0) & (tl.abs(error) < float("inf")) & ((bits & 1) == 0)
    return (bits + tl.where(inexact, away, 0)).to(tl.float32, bitcast=True).to(OUT)


@triton.jit
def int4_scales(low, high, EPS: tl.constexpr, RECIPROCAL: tl.constexpr):
    """Least and largest value of a group -> (scale, zero point), float32."""
    scale = most(high - low, EPS) * RECIPROCAL
    return scale, low + 8.0 * scale


@triton.jit
def int4_shifted(d, s, fits):
    """d: x less the least value of its group; s: scales beside it, (R, 1) or (1, C); fits: whether all are below 2^60,
    and they are at least EPS / 15 -> 2^23 + 8 + code, code -8..7.
    """
    if fits:
        q = quotient(d, s, tl.div_rn(tl.full(s.shape, 1.0, tl.float32), s))
    else:
        q = tl.div_rn(d, s + tl.zeros_like(d))
    # above 15 there is nothing, for the range of a group is 15 scales; NaN is code 0
    return tl.where(q == q, q + ROUND, ROUND + 8.0)


@triton.jit
def _encode(
    x_ptr, partial_ptr, codes_ptr, scale_ptr, zero_ptr, values_ptr, n_blocks, block, n,
    INT4: tl.constexpr, VLLM: tl.constexpr, TENSOR: tl.constexpr, ASYMMETRIC: tl.constexpr, FLOAT32_SCALE: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr, EPS: tl.constexpr, RECIPROCAL: tl.constexpr, BITS: tl.constexpr,
    CODES: tl.constexpr, VALUES: tl.constexpr, CENTRED: tl.constexpr, FUSED: tl.constexpr, DTYPE: tl.constexpr,
    NB: tl.constexpr, B: tl.constexpr, N_PARTIALS: tl.constexpr,
):  # fmt: skip
    """VLLM: what multiplies x, "127 / amax", "1 / scale" or "". CENTRED: values are q - zero, without the scale."""
    i = tl.program_id(0)
    index = tl.cast(i, tl.int64) * NB + tl.arange(0, NB)
    column = tl.arange(0, B)[None, :]
    inside = (index < n_blocks)[:, None] & (column < block)
    at = index[:, None] * block + column
    if TENSOR:
        inside = inside & (at < n)  # blocks only share out the work, so the last may be ragged
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if TENSOR:
        place = tl.arange(0, N_PARTIALS)
        low = tl.reduce(tl.load(partial_ptr + place), 0, least) + tl.zeros([NB], tl.float32)
        high = tl.reduce(tl.load(partial_ptr + N_PARTIALS + place), 0, most) + tl.zeros([NB], tl.float32)
    else:
        low = tl.reduce(tl.where(column < block, x, float("inf")), 1, least)
        high = tl.reduce(tl.where(column < block, x, float("-inf")), 1, most)

    if INT4:
        scale, zero = int4_scales(low, high, EPS, RECIPROCAL)
        shifted = int4_shifted(x - low[:, None], scale[:, None], tl.max(scale, axis=0) < 2.0**60)
        code, q = float_bits(shifted) ^ 8, shifted - (ROUND + 8.0)
        scale, zero = through(scale, DTYPE), through(zero, DTYPE)
    elif VLLM != "":
        amax, one = tl.abs(most(-low, high)), tl.full([NB], 1.0, tl.float32)
        scale, zero = tl.div_rn(amax, one * 127.0), tl.zeros_like(amax)
        if VLLM == "1 / scale":
            factor = tl.div_rn(one, scale)
        else:
            factor = tl.where(amax == 0.0, 0.0, tl.div_rn(one * 127.0, amax))
        y = x * factor[:, None]  # beyond 127 where factor overflows
        y = tl.where(y == y, tl.minimum(tl.maximum(y, LOW), HIGH), 0.0) + ROUND_SIGNED
        code, q = float_bits(y), y - ROUND_SIGNED
    else:
        low, high = least(low, 0.0), most(high, 0.0)
        span = through(high - low, DTYPE) if ASYMMETRIC else most(-low, high)
        scale = most(through(span * RECIPROCAL, DTYPE), EPS)
        zero = tl.zeros_like(scale)
        if ASYMMETRIC:
            zero = LOW - round_even(through(tl.div_rn(low, scale), DTYPE))
            zero = tl.where(zero == zero, tl.minimum(tl.maximum(zero, LOW), HIGH), 0.0)
        inverse = tl.div_rn(tl.full([NB], 1.0, tl.float32), scale)
        y = x * (inverse if FLOAT32_SCALE else through(inverse, DTYPE))[:, None]
        y = y if FLOAT32_SCALE else through(y, DTYPE)
        y = y + ROUND_SIGNED  # at most 256 in magnitude, by the choice of the scale
        y = tl.where(y == y, y + zero[:, None], ROUND_SIGNED)
        y = tl.minimum(tl.maximum(y, ROUND_SIGNED + LOW), ROUND_SIGNED + HIGH)
        code, q = float_bits(y), y - ROUND_SIGNED

    if CODES:
        if BITS == 4:
            nibble = (code if INT4 else code ^ 8) & 15  # adding 8 to four bits is flipping the top one
            half = index[:, None] * (block // 2) + tl.arange(0, B // 2)[None, :]
            inside_half = (index < n_blocks)[:, None] & (tl.arange(0, B // 2)[None, :] < block // 2)
            if TENSOR:
                inside_half = inside_half & (half < n // 2)
            tl.store(codes_ptr + half, pack4(nibble, NB, B).to(tl.uint8), mask=inside_half)
        elif BITS == 8:
            tl.store(codes_ptr + at, code.to(tl.int8), mask=inside)
        else:  # eight codes are BITS bytes: byte b has bit b of each
            eights = tl.reshape((code ^ (1 << (BITS - 1))) & ((1 << BITS) - 1), (NB, B // 8, 8))
            eighth = index[:, None] * (block // 8) + tl.arange(0, B // 8)[None, :]
            inside_eighth = (index < n_blocks)[:, None] & (tl.arange(0, B // 8)[None, :] < block // 8)
            if TENSOR:
                inside_eighth = inside_eighth & (eighth < n // 8)
            for b in tl.static_range(BITS):
                byte = tl.sum(((eights >> b) & 1) << tl.arange(0, 8)[None, None, :], axis=2)
                tl.store(codes_ptr + eighth * BITS + b, byte.to(tl.uint8), mask=inside_eighth)
    if not TENSOR or i == 0:
        stored = index < (1 if TENSOR else n_blocks)
        if scale_ptr is not None:
            tl.store(scale_ptr + index, scale.to(scale_ptr.dtype.element_ty), mask=stored)
        if zero_ptr is not None:
            tl.store(zero_ptr + index, zero.to(zero_ptr.dtype.element_ty), mask=stored)
    if VALUES:
        OUT: tl.constexpr = values_ptr.dtype.element_ty
        if INT4:
            value = _int4_values(q, scale[:, None], zero[:, None], FUSED, OUT)
        else:
            value = _affine_values(
                q, zero[:, None], scale[:, None], CENTRED, tl.float32 if FLOAT32_SCALE else DTYPE
            ).to(OUT)
        tl.store(values_ptr + at, value, mask=inside)


@triton.jit
def _affine_values(q, zero, scale, CENTRED: tl.constexpr, SCALE_DTYPE: tl.constexpr):
    if CENTRED:
        return q - zero
    return through(through(q - zero, SCALE_DTYPE) * scale, SCALE_DTYPE)


@triton.jit
def _decode(
    codes_ptr, scale_ptr, zero_ptr, values_ptr, n_blocks, block, SCALE_STRIDE,
    INT4: tl.constexpr, BITS: tl.constexpr, CENTRED: tl.constexpr, FUSED: tl.constexpr,
    NB: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    # a row may be longer than a tile: the second grid axis walks along it
    index = tl.cast(tl.program_id(0), tl.int64) * NB + tl.arange(0, NB)
    start = tl.program_id(1) * B
    column = start + tl.arange(0, B)[None, :]
    rows = (index < n_blocks)[:, None]
    if BITS == 4:
        half_column = start // 2 + tl.arange(0, B // 2)[None, :]
        packed = tl.load(
            codes_ptr + index[:, None] * (block // 2) + half_column, mask=rows & (half_column < block // 2), other=0
        )
        code = unpack4(packed, NB, B) & 15
        q = (((code ^ 8) - 8) if INT4 else (code - 8)).to(tl.float32)
    elif BITS != 8:
        eighth = index[:, None] * (block // 8) + column // 8
        code = tl.zeros([NB, B], tl.int32)
        for b in tl.static_range(BITS):
            byte = tl.load(codes_ptr + eighth * BITS + b, mask=rows & (column < block), other=0).to(tl.int32)
            code |= ((byte >> (column % 8)) & 1) << b
        q = (code - (1 << (BITS - 1))).to(tl.float32)
    else:
        q = tl.load(codes_ptr + index[:, None] * block + column, mask=rows & (column < block), other=0)
        q = q.to(tl.int8, bitcast=True).to(tl.float32)
    SCALE_DTYPE: tl.constexpr = scale_ptr.dtype.element_ty
    scale = tl.load(scale_ptr + index * SCALE_STRIDE, mask=index < n_blocks, other=0.0).to(tl.float32)[:, None]
    zero = tl.zeros([NB, 1], tl.float32)
    if zero_ptr is not None:
        zero = tl.load(zero_ptr + index * SCALE_STRIDE, mask=index < n_blocks, other=0).to(tl.float32)[:, None]
    OUT: tl.constexpr = values_ptr.dtype.element_ty
    if INT4:
        value = _int4_values(q, scale, zero, FUSED, OUT)
    else:
        value = _affine_values(q, zero, scale, CENTRED, SCALE_DTYPE).to(OUT)
    tl.store(values_ptr + index[:, None] * block + column, value, mask=rows & (column < block))


def _fused(format: Int4 | Affine, scale_dtype: torch.dtype, out: torch.dtype) -> tl.dtype | None:
    """Type of the multiply-add that computes an int4 operand, as in `formats.elements.fma_round`, or None."""
    if torch.float32 in (scale_dtype, out):
        return tl.float32
    return TL_DTYPE[out] if scale_dtype == out else None


def _block(format: Int4 | Affine, k: int) -> int:
    """Values that a program takes as a block; under one scale for all it only shares out the work."""
    return format.block or (4096 if format.per == "tensor" else k)


@lru_cache(LAUNCHES)
def _encoder(
    format: Int4 | Affine, rows: int, k: int, source: torch.dtype, dtype: torch.dtype | None, operand: bool, codes: bool
) -> Launch:
    per = format.per
    block = _block(format, k)
    n_blocks, width = triton.cdiv(rows * k, block), triton.next_power_of_2(block)
    nb = max(1, TILE // width)
    int4, asymmetric, scale_dtype = _kinds(format, source)
    low, high = format.limits
    steps = float(high - low) if asymmetric else (high - low) / 2
    return Launch(
        _encode, (triton.cdiv(n_blocks, nb),), n_blocks=n_blocks, block=block, n=rows * k,
        INT4=int4, VLLM=_FACTOR_OF.get(type(format), ""), TENSOR=per == "tensor", ASYMMETRIC=asymmetric,
        FLOAT32_SCALE=format.scales == "float32", LOW=float(low), HIGH=float(high),
        EPS=format._eps(source), RECIPROCAL=reciprocal(steps), BITS=format.bits,
        CODES=codes, VALUES=dtype is not None, CENTRED=operand and per != "group",
        FUSED=None if dtype is None else _fused(format, scale_dtype, dtype), DTYPE=TL_DTYPE[scale_dtype if int4 else source], NB=nb, B=width,
        N_PARTIALS=PARTIALS, num_warps=min(16, nb * width // TILE), **NO_FUSION,
    )  # fmt: skip


def _kinds(format: Int4 | Affine, source: torch.dtype) -> tuple[bool, bool, torch.dtype]:
    """(int4, asymmetric, dtype of the scales) of a matrix of `source`."""
    if isinstance(format, Int4):
        return True, True, torch.bfloat16 if format.scales == "bfloat16" else source
    return False, format.mapping == "asymmetric", torch.float32 if format.scales == "float32" else source


def encode(format: Int4 | Affine, x_RK: Tensor, ask: Ask, mix: Operand | None) -> Side:
    """Make what `ask` asks for of x_RK. mix: not used."""
    x_RK = x_RK.contiguous()
    (rows, k), device = x_RK.shape, x_RK.device
    per = format.per
    int4, asymmetric, scale_dtype = _kinds(format, x_RK.dtype)
    shape = (1, 1) if per == "tensor" else (rows, k // format.block if format.block else 1)
    codes = scale = zero = None
    if ask.codes or per != "group":
        scale = torch.empty(shape, dtype=scale_dtype, device=device)
    if ask.codes:
        code_dtype = torch.int8 if format.bits == 8 else torch.uint8
        codes = torch.empty(rows, k * format.bits // 8, dtype=code_dtype, device=device)
        if asymmetric:
            zero = torch.empty(shape, dtype=scale_dtype if int4 else torch.int8, device=device)
    values = None if ask.values is None else torch.empty(rows, k, dtype=ask.values, device=device)
    partials = range_partials(x_RK) if per == "tensor" else None
    _encoder(format, rows, k, x_RK.dtype, ask.values, ask.operand, ask.codes)(
        x_RK, partials, codes, scale, zero, values
    )
    alpha = None if scale is None or per == "group" else scale.float()
    return Side(None if codes is None else Encoded(codes, scale, zero, None, k), values, alpha)


@lru_cache(LAUNCHES)
def _decoder(
    format: Int4 | Affine, rows: int, k: int, scales: int, scale_dtype: torch.dtype, dtype: torch.dtype, operand: bool
) -> Launch:
    block = format.block or k
    n_blocks, width = rows * k // block, min(triton.next_power_of_2(block), TILE)
    nb = TILE // width
    return Launch(
        _decode, (triton.cdiv(n_blocks, nb), triton.cdiv(block, width)), n_blocks=n_blocks, block=block,
        SCALE_STRIDE=int(scales > 1), INT4=format.element == "int4", BITS=format.bits,
        CENTRED=operand and format.block is None, FUSED=_fused(format, scale_dtype, dtype), NB=nb, B=width, num_warps=1, **NO_FUSION,
    )  # fmt: skip


def decode(format: Int4 | Affine, e: Encoded, dtype: torch.dtype, operand: bool) -> Tensor:
    """(R, K) values in `dtype`: the operand, or decoded."""
    rows, scale = e.codes.shape[0], e.scales
    values = torch.empty(rows, e.k, dtype=dtype, device=e.codes.device)
    # one zero for all rows may stand beside a scale for each (`Affine.rowwise`), and the kernel finds both by one index
    zero = None if e.zero is None else e.zero.expand(scale.shape).contiguous()
    launch = _decoder(format, rows, e.k, scale.numel(), scale.dtype, dtype, operand)
    launch(e.codes.contiguous(), scale.contiguous(), zero, values)
    return values
