"""Write keys and values as engines store them: `KVFormat.pack`, and what attention reads of the bytes, in one pass.

Token-head formats take the instructions of vLLM's Triton writers: `div.full` for scales and their reciprocals, and one
fused multiply-add where vLLM's compiler makes one of x * (1 / s) + .5. The reference on a CPU divides and adds by IEEE,
so a few codes and scales differ there. Static scales divide by IEEE, as vLLM's CUDA writer does.

float8 is rounded by arithmetic (`element_codes`): ptxas has miscompiled conversions whose codes are stored by bytes.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from aoquant.formats.kv import SIGNS as SIGN_BITS
from aoquant.formats.kv import KVFormat

from .element_codes import (
    INF_BITS,
    NAN_BITS,
    bits_float,
    float8_index,
    float8_nearest,
    float_bits,
    least,
    most,
    pack4,
)
from .launch import LAUNCHES, Launch

TILE = 1024  # values of a program


@triton.jit
def _signs(BITS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr):
    """(1, PADDED) float32: the signs of the rotation, repeated for each block."""
    k = tl.arange(0, PADDED) % BLOCK
    bits = tl.zeros([PADDED], tl.int32)
    for word in tl.static_range((BLOCK + 15) // 16):
        bits = tl.where(k // 16 == word, ((BITS >> (16 * word)) & 0xFFFF) >> (k % 16), bits)
    return tl.where((bits & 1) == 1, -1.0, 1.0)[None, :]


@triton.jit
def butterflies(y, ROWS: tl.constexpr, PADDED: tl.constexpr, STEPS: tl.constexpr):
    """(ROWS, PADDED) float32 -> Sylvester's matrix times blocks of 2^STEPS, in the reference's order."""
    for i in tl.static_range(STEPS):
        pairs = tl.permute(tl.reshape(y, (ROWS, PADDED // (2 << i), 2, 1 << i)), (0, 1, 3, 2))
        a, b = tl.split(pairs)
        y = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), (ROWS, PADDED))
    return y


@triton.jit
def _half_away(y, limit_low, limit_high):
    """Whole numbers, half away from zero, clamped, as int32; 0 for NaN. y has its half added already."""
    y = tl.minimum(tl.maximum(y, limit_low), limit_high)
    return tl.where(y != y, 0.0, y).to(tl.int32)


@triton.jit
def _float8(y, ELEMENT: tl.constexpr):
    """float32 -> (int32 codes, the values that they stand for), saturating; NaN stays."""
    limit = 448.0 if ELEMENT == "e4m3" else 57344.0
    y = float8_nearest(least(most(y, -limit), limit), ELEMENT)
    code = tl.where(y != y, 0x7F | ((float_bits(y) >> 24) & 0x80), float8_index(y, ELEMENT))
    return code, y


@triton.jit(do_not_specialize=["position", "capacity"])
def _write(
    x_ptr, scale_ptr, out_ptr, position, capacity, rows, tokens, heads, x_batch, x_head, x_token,
    KIND: tl.constexpr, VALUES: tl.constexpr, PER_HEAD: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr,
    BLOCK: tl.constexpr, STEPS: tl.constexpr, BITS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rows of x (batch, heads, tokens, D) to tokens position.. of out (batch, heads, capacity, WIDTH bytes); VALUES:
    what reading gives instead, to out (batch, heads, tokens, D).
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, PADDED)[None, :]
    inside, column = row < rows, d < D
    t, bh = row % tokens, row // tokens
    h = bh % heads
    origin = (bh // heads).to(tl.int64) * x_batch + h.to(tl.int64) * x_head + t.to(tl.int64) * x_token
    y = tl.load(x_ptr + origin[:, None] + d, mask=inside[:, None] & column, other=0.0).to(tl.float32)
    zero = tl.zeros([ROWS, PADDED], tl.float32)

    if KIND == "fp8" or KIND == "fp8-e5m2":
        s = tl.zeros([ROWS], tl.float32) + 1.0
        if scale_ptr is not None:
            s = tl.load(scale_ptr + (h if PER_HEAD else h * 0), mask=inside, other=1.0)
            y = tl.div_rn(y, s[:, None] + zero)
        code, value = _float8(y, "e5m2" if KIND == "fp8-e5m2" else "e4m3")
        value = value * s[:, None]
    elif KIND == "int4-token-head":
        sign = _signs(BITS, PADDED, BLOCK)
        y = butterflies(y * sign, ROWS, PADDED, STEPS).to(x_ptr.dtype.element_ty).to(tl.float32)
        low = tl.min(tl.where(column, y, float("inf")), axis=1)
        high = tl.max(tl.where(column, y, float("-inf")), axis=1)
        s = tl.maximum((high - low) / 15.0, 1e-6)
        s = tl.where(
            tl.max(float_bits(y) & 0x7FFFFFFF, axis=1) > INF_BITS,
            bits_float(tl.zeros_like(s).to(tl.int32) + NAN_BITS),
            s,
        )
        start = -low / s
        z = _half_away(tl.where(start >= 0, start + 0.5, start - 0.5), 0.0, 15.0)
        zero_point = z.to(tl.float32)[:, None] + zero
        shifted = tl.fma(y, (1.0 / s)[:, None] + zero, zero_point)
        code = _half_away(tl.where(shifted >= 0, shifted + 0.5, shifted - 0.5), 0.0, 15.0)
        bits = (float_bits(s) & -16) | z
        value = (code.to(tl.float32) - zero_point) * bits_float(bits & -16)[:, None]
        if VALUES:
            value = butterflies(value, ROWS, PADDED, STEPS) * sign * (1.0 / BLOCK)
        s = bits_float(bits)
    else:
        top = 448.0 if KIND == "fp8-token-head" else 127.0
        s = most(bits_float(tl.max(float_bits(y) & 0x7FFFFFFF, axis=1)) / top, 1e-6)
        inverse = (1.0 / s)[:, None] + zero
        if KIND == "fp8-token-head":
            code, value = _float8(y * inverse, "e4m3")
        else:
            code = _half_away(tl.fma(y, inverse, tl.where(y * inverse >= 0, 0.5, -0.5)), -128.0, 127.0)
            value = code.to(tl.float32)
        value = value * s[:, None]

    if VALUES:
        tl.store(
            out_ptr + row.to(tl.int64)[:, None] * D + d,
            value.to(out_ptr.dtype.element_ty),
            mask=inside[:, None] & column,
        )
    else:
        at = (bh.to(tl.int64) * capacity + position + t) * WIDTH
        if KIND == "int4-token-head":
            half = tl.arange(0, PADDED // 2)[None, :]
            keep = inside[:, None] & (half < D // 2)
            tl.store(out_ptr + at[:, None] + half, pack4(code, ROWS, PADDED).to(tl.uint8), mask=keep)
        else:
            tl.store(out_ptr + at[:, None] + d, (code & 255).to(tl.uint8), mask=inside[:, None] & column)
        if WIDTH % D and WIDTH != D // 2:
            words = out_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
            tl.store(words + (at + (WIDTH - 4)) // 4, float_bits(s), mask=inside)


@lru_cache(LAUNCHES)
def _writer(format: KVFormat, shape: torch.Size, strides: tuple[int, ...], per_head: bool, values: bool) -> Launch:
    batch, heads, tokens, d = shape
    rows, padded, block = batch * heads * tokens, triton.next_power_of_2(d), d & -d
    per_program = max(1, TILE // padded)
    return Launch(
        _write, (triton.cdiv(rows, per_program),), rows=rows, tokens=tokens, heads=heads, x_batch=strides[0],
        x_head=strides[1], x_token=strides[2], KIND=format.name, VALUES=values, PER_HEAD=per_head, D=d, PADDED=padded,
        BLOCK=block, STEPS=block.bit_length() - 1, BITS=SIGN_BITS & ((1 << max(block, 16)) - 1),
        WIDTH=format.row_bytes(d) + format.scale_bytes, ROWS=per_program, enable_fp_fusion=False, num_warps=4,
    )  # fmt: skip


def write(x: Tensor, format: KVFormat, scale: Tensor | None, out: Tensor, position: int = 0) -> None:
    """Write x (batch, heads, tokens, head_dim) to tokens `position`.. of a cache.

    scale: static, float32 with one value or one for each head. out: uint8 (batch, heads, capacity, bytes of a row),
        contiguous; or x's dtype and shape, for what attention reads of the bytes.
    """
    if x.numel():
        x = x if x.stride(-1) == 1 else x.contiguous()
        per_head = scale is not None and scale.numel() > 1
        launch = _writer(format, x.shape, x.stride(), per_head, out.dtype != torch.uint8)
        launch(x, scale, out, position, out.shape[2])
