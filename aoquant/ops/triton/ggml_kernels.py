"""ggml's blocks of 32, encoded and decoded in one pass each, as `formats/ggml.py` defines them.

Codes are made with the scale as it is, float32; values with the scale that is stored, float16.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from aoquant.formats import Encoded, Ggml, Operand

from ..quantized import Ask, Side
from .element_codes import INF_BITS, ROUND_SIGNED, bits_float, float_bits, least, most, pack4, through, unpack4
from .launch import LAUNCHES, Launch

B = 32
NB = 32  # blocks that a program holds: one warp of 1024 values


@triton.jit
def _inverse(d):
    """1 / d, 0 for 0."""
    return tl.where(d == 0.0, 0.0, tl.div_rn(tl.zeros_like(d) + 1.0, d))


@triton.jit
def _held(v, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Within the codes; NaN is code 0, which is in their range."""
    return tl.where(v == v, tl.minimum(tl.maximum(v, LOW), HIGH), 0.0)


@triton.jit
def _first(x, chosen, B: tl.constexpr):
    """(NB,): the first value of a block among the chosen ones, or else of all."""
    lane = tl.arange(0, B)[None, :]
    first = tl.min(tl.where(chosen, lane, B), axis=1)
    first = tl.where(first == B, 0, first)
    return bits_float(tl.sum(tl.where(lane == first[:, None], float_bits(x), 0), axis=1))


@triton.jit
def _encode(
    x_ptr, codes_ptr, scale_ptr, zero_ptr, values_ptr, n_blocks,
    KIND: tl.constexpr, CODES: tl.constexpr, VALUES: tl.constexpr, NB: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    block = tile * NB + tl.arange(0, NB)
    there = block < n_blocks
    inside = there[:, None]
    at = block[:, None] * B + tl.arange(0, B)[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    magnitude = float_bits(x) & 0x7FFFFFFF
    top = tl.max(magnitude, axis=1)
    amax = bits_float(top)
    zero = tl.zeros([NB], tl.float32)
    if KIND == "q4_0":
        scale = _first(x, magnitude == top[:, None], B) * -0.125
        scale = tl.where(top > INF_BITS, float("nan"), scale)
        code = _held(x * _inverse(scale)[:, None] + 8.5, 0.0, 15.0).to(tl.int32)  # towards zero
        q = (code - 8).to(tl.float32)
    elif KIND == "q4_1":
        low, high = tl.reduce(x, 1, least), tl.reduce(x, 1, most)
        scale = tl.div_rn(high - low, tl.zeros_like(high) + 15.0)
        zero = _first(x, x == low[:, None], B)
        code = _held((x - zero[:, None]) * _inverse(scale)[:, None] + 0.5, 0.0, 15.0).to(tl.int32)
        q = code.to(tl.float32)
    else:
        scale = tl.div_rn(amax, tl.zeros_like(amax) + 127.0)
        if KIND == "q8_0":
            v = x * _inverse(scale)[:, None]
            v = _held(v, -127.0, 127.0)
            whole = tl.floor(tl.abs(v))
            q = whole + tl.where(tl.abs(v) - whole >= 0.5, 1.0, 0.0)
            q = tl.where(v < 0.0, -q, q)
        else:
            factor = tl.where(amax == 0.0, 0.0, tl.div_rn(tl.zeros_like(amax) + 127.0, amax))
            q = (_held(x * factor[:, None], -127.0, 127.0) + ROUND_SIGNED) - ROUND_SIGNED
        code = q.to(tl.int32)
        q = code.to(tl.float32)  # codes have no -0
    if CODES:
        tl.store(scale_ptr + block, scale.to(tl.float16), mask=there)
        if zero_ptr is not None:
            tl.store(zero_ptr + block, zero.to(tl.float16), mask=there)
        if KIND == "q4_0" or KIND == "q4_1":
            half = block[:, None] * (B // 2) + tl.arange(0, B // 2)[None, :]
            tl.store(codes_ptr + half, pack4(code, NB, B).to(tl.uint8), mask=inside)
        else:
            tl.store(codes_ptr + at, code.to(tl.int8), mask=inside)
    if VALUES:
        value = q * through(scale, tl.float16)[:, None]
        if KIND == "q4_1":
            value = value + through(zero, tl.float16)[:, None]
        tl.store(values_ptr + at, value.to(values_ptr.dtype.element_ty), mask=inside)


@triton.jit
def block_integers(codes_ptr, at, inside, KIND: tl.constexpr, ROWS: tl.constexpr, B: tl.constexpr):
    """(ROWS, B) int32: what the scales multiply. at: (ROWS,) blocks, counted in the whole matrix. inside: which are
    there, or None.
    """
    mask = None if inside is None else inside[:, None]
    other = None if inside is None else 0
    if KIND == "q4_0" or KIND == "q4_1":
        half = at[:, None] * (B // 2) + tl.arange(0, B // 2)[None, :]
        code = unpack4(tl.load(codes_ptr + half, mask=mask, other=other), ROWS, B) & 15
        return code - 8 if KIND == "q4_0" else code
    else:
        place = at[:, None] * B + tl.arange(0, B)[None, :]
        return tl.load(codes_ptr + place, mask=mask, other=other).to(tl.int32)


@triton.jit
def _decode(
    codes_ptr, scale_ptr, zero_ptr, values_ptr, n_blocks, KIND: tl.constexpr, NB: tl.constexpr, B: tl.constexpr
):
    tile = tl.program_id(0).to(tl.int64)
    block = tile * NB + tl.arange(0, NB)
    there = block < n_blocks
    scale = tl.load(scale_ptr + block, mask=there, other=0.0).to(tl.float32)
    value = block_integers(codes_ptr, block, there, KIND, NB, B).to(tl.float32) * scale[:, None]
    if zero_ptr is not None:
        value = value + tl.load(zero_ptr + block, mask=there, other=0.0).to(tl.float32)[:, None]
    at = block[:, None] * B + tl.arange(0, B)[None, :]
    tl.store(values_ptr + at, value.to(values_ptr.dtype.element_ty), mask=there[:, None])


def encode(format: Ggml, x_RK: Tensor, ask: Ask, mix: Operand | None) -> Side:
    """Make what `ask` asks for of x_RK; the operand is what codes decode to. mix: not used."""
    x_RK = x_RK.contiguous()
    (rows, k), device = x_RK.shape, x_RK.device
    codes = scale = zero = None
    if ask.codes:
        nibbles = format.bits == 4
        codes = torch.empty(rows, k // 2 if nibbles else k, dtype=torch.uint8 if nibbles else torch.int8, device=device)
        scale = torch.empty(rows, k // B, dtype=torch.float16, device=device)
        zero = torch.empty_like(scale) if format.kind == "q4_1" else None
    values = None if ask.values is None else torch.empty(rows, k, dtype=ask.values, device=device)
    _encoder(format, rows * k // B, ask.codes, values is not None)(x_RK, codes, scale, zero, values)
    return Side(None if codes is None else Encoded(codes, scale, zero, None, k), values, None)


@lru_cache(LAUNCHES)
def _encoder(format: Ggml, n_blocks: int, codes: bool, values: bool) -> Launch:
    return Launch(
        _encode, (triton.cdiv(n_blocks, NB),), n_blocks=n_blocks, KIND=format.kind, CODES=codes, VALUES=values, NB=NB, B=B,
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip


def decode(format: Ggml, e: Encoded, dtype: torch.dtype, operand: bool) -> Tensor:
    """(R, K) values in `dtype`: the operand, or decoded, which are the same."""
    rows = e.codes.shape[0]
    values = torch.empty(rows, e.k, dtype=dtype, device=e.codes.device)
    zero = None if e.zero is None else e.zero.contiguous()
    _decoder(format, rows * e.k // B)(e.codes.contiguous(), e.scales.contiguous(), zero, values)
    return values


@lru_cache(LAUNCHES)
def _decoder(format: Ggml, n_blocks: int) -> Launch:
    return Launch(
        _decode, (triton.cdiv(n_blocks, NB),), n_blocks=n_blocks, KIND=format.kind, NB=NB, B=B, num_warps=1,
        enable_fp_fusion=False,
    )  # fmt: skip
