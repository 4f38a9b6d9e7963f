"""Attend from one query token to a cache of bytes: multiply the codes as they are, and apply their scales afterwards.

    S = (Q . code_k) * (softmax scale * s_k)      P = exp(S - max) * s_v      out = f16(P) . code_v / sum of (P / s_v)

Codes are exact in float16, so no key or value is rounded after decoding. Each row of Q is multiplied by a power of two
that makes it fit float16. The maximum is that of S + log s_v, so P <= 1; P is multiplied by 2^15, which keeps 11 bits
of every P above 2^-29. Sums are float32. A static scale of values multiplies the sum instead of P. int4 is multiplied
in the rotated space where it is stored: the query is rotated once, and `_combine` rotates the result back.

    Q' = f16(Q D H)      S = (Q' . code - z sum Q') * (softmax scale * s / b)

vLLM 0.33 factors attention in the same way (`triton_unified_attention`, `int4_per_token_head`).

A program takes one key-value head, the queries that share it, and one part of the tokens. It loads codes as words of 16
bits, because tensor-core loads transpose 16-bit elements and no smaller ones, and unpacks the values of every word:
dimensions 2 j and 2 j + 1 are one product each, or 4 j to 4 j + 3 of int4. `_combine` joins the parts. Their number
depends on batch, heads and tokens alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from aoquant.formats.kv import SIGNS, KVFormat
from aoquant.transforms.hadamard import signs

from .element_codes import bits_float, float_bits
from .kv_write import butterflies
from .launch import LAUNCHES, Launch, multiprocessors

PARTS = 128  # at most
SHORT = 1024  # tokens of a multiprocessor, below which one program reads them all
LOG2E = 1.4426950408889634


def _int8(shift: int) -> tl.constexpr:
    """Return PTX that converts the byte at `shift` of each 16-bit word: 0x6480 ^ byte is 1024 + 128 + its value."""
    return tl.constexpr(
        f"{{.reg .b32 t, c; mov.b32 c, 0x64806480; shr.u32 t, $1, {shift}; lop3.b32 t, t, 0x00ff00ff, c, 0x6a; "
        "sub.f16x2 $0, t, c;}"
    )


def _e4m3(bytes: int) -> tl.constexpr:
    """Return PTX that converts two bytes of a register, by the selector of `prmt`."""
    return tl.constexpr(
        f"{{.reg .b32 t; .reg .b16 h, u; prmt.b32 t, $1, 0, 0x{bytes:04x}; mov.b32 {{h, u}}, t; "
        "cvt.rn.f16x2.e4m3x2 $0, h;}"
    )


def _int4(shift: int, mask: int) -> tl.constexpr:
    """Return PTX that keeps a nibble of each 16-bit word: a subnormal float16, code * UNIT, or 16 times that."""
    return tl.constexpr(f"{{.reg .b32 t; shr.u32 t, $1, {shift}; and.b32 $0, t, 0x{mask:04x}{mask:04x};}}")


INT4_0, INT4_1, INT4_2, INT4_3 = _int4(0, 0x000F), _int4(0, 0x00F0), _int4(8, 0x000F), _int4(8, 0x00F0)
UNIT = tl.constexpr(2.0**-24)  # the least positive float16
INT8_0, INT8_1 = _int8(0), _int8(8)
E4M3_0, E4M3_1 = _e4m3(0x4420), _e4m3(0x4431)
E5M2_0, E5M2_1 = tl.constexpr("prmt.b32 $0, $1, 0, 0x2404;"), tl.constexpr("and.b32 $0, $1, 0xff00ff00;")


@triton.jit
def _unpacked(words, PTX: tl.constexpr):
    return tl.inline_asm_elementwise(PTX, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def _values(words, KIND: tl.constexpr, INDEX: tl.constexpr):
    """Unpack value INDEX of uint16 words as float16, without scale; int4 times UNIT, or 16 UNIT for an odd INDEX."""
    if KIND == "int4-token-head":
        if INDEX < 2:
            return _unpacked(words, INT4_0 if INDEX == 0 else INT4_1)
        else:
            return _unpacked(words, INT4_2 if INDEX == 2 else INT4_3)
    elif KIND == "int8-token-head":
        return _unpacked(words, INT8_0 if INDEX == 0 else INT8_1)
    elif KIND == "fp8-e5m2":
        return _unpacked(words, E5M2_0 if INDEX == 0 else E5M2_1)
    else:
        return _unpacked(words, E4M3_0 if INDEX == 0 else E4M3_1)


@triton.jit
def _log2(x):
    return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _largest(a, b):
    """Return (M,), the largest magnitude of each row of a and b."""
    return tl.maximum(tl.max(tl.abs(a), axis=1), tl.max(tl.abs(b), axis=1))


@triton.jit(do_not_specialize=["tokens", "capacity", "mask_batch", "parts"])
def _attend(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, mask_ptr, signs_ptr, sums_ptr, tokens, capacity, mask_batch, parts,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KW: tl.constexpr,
    VW: tl.constexpr, K_PER_HEAD: tl.constexpr, V_PER_HEAD: tl.constexpr, SCALE: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """Store the sums and the statistics (maximum, sum of P / s_v) of one part.

    SCALE: of the softmax, times log2(e). M: queries of a program, at least GROUP. KW, VW: bytes of a row. Formats per
    token and head have their scale behind the codes; k_scale_ptr and v_scale_ptr are of static formats. mask_ptr:
    (batch, 1, 1, tokens) uint8 that allows, or floats that are added; or None. signs_ptr: (D,) float32, the signs of
    int4's rotation; or None. sums_ptr: float32, (batch * HEADS, parts, GROUP, D) sums and then as many pairs of
    statistics.
    """
    KE: tl.constexpr = 4 if K == "int4-token-head" else 2  # values of a word
    VE: tl.constexpr = 4 if V == "int4-token-head" else 2
    K_OWN: tl.constexpr = KW > D or KE == 4  # each row has its own scale
    V_OWN: tl.constexpr = VW > D or VE == 4
    bh, part = tl.program_id(0), tl.program_id(1)
    batch, head = bh // HEADS, bh % HEADS
    share = tl.cdiv(tl.cdiv(tokens, parts), N) * N
    start = part * share
    end = tl.minimum(start + share, tokens)
    first = bh.to(tl.int64) * capacity

    g, d, kj, vj = tl.arange(0, M), tl.arange(0, D), tl.arange(0, D // KE), tl.arange(0, D // VE)
    keep = g < GROUP
    q = tl.load(q_ptr + (bh * GROUP + g)[:, None] * D + d[None, :], mask=keep[:, None], other=0.0).to(tl.float32)
    if KE == 4:
        # H of D values is H of 4 times H of D / 4. Products of bfloat16 with +-1 are exact in tf32.
        mixed = kj[:, None] & kj[None, :]
        mixed ^= mixed >> 4
        mixed ^= mixed >> 2
        h = (1 - 2 * ((mixed ^ (mixed >> 1)) & 1)).to(tl.float32)
        even, odd = tl.split(tl.reshape(q * tl.load(signs_ptr + d)[None, :], (M, D // 4, 2, 2)))
        f0, f2 = tl.split(even)
        f1, f3 = tl.split(odd)
        f0, f1 = tl.dot(f0, h, input_precision="tf32"), tl.dot(f1, h, input_precision="tf32")
        f2, f3 = tl.dot(f2, h, input_precision="tf32"), tl.dot(f3, h, input_precision="tf32")
        f0, f1, f2, f3 = f0 + f1, f0 - f1, f2 + f3, f2 - f3
        f0, f1, f2, f3 = f0 + f2, f1 + f3, f0 - f2, f1 - f3
        largest = tl.maximum(_largest(f0, f1), _largest(f2, f3))
    else:
        f0, f1 = tl.split(tl.reshape(q, (M, D // 2, 2)))
        largest = _largest(f0, f1)
    exponent = float_bits(largest) >> 23
    # The largest |q| of a row goes to [2^14, 2^15). Rows with Inf or NaN are multiplied by 1, rows of zeros by 2^126.
    exponent = tl.where(exponent == 255, 141, tl.maximum(exponent, 15))
    up, factor = bits_float((268 - exponent) << 23), bits_float((exponent - 14) << 23) * SCALE
    odd_up = up / 16.0 if KE == 4 else up
    q0, q1 = (f0 * up[:, None]).to(tl.float16), (f1 * odd_up[:, None]).to(tl.float16)
    if KE == 4:
        q2, q3 = (f2 * up[:, None]).to(tl.float16), (f3 * odd_up[:, None]).to(tl.float16)
        q_sum = tl.sum(q0.to(tl.float32) + q2.to(tl.float32), axis=1) * UNIT
        q_sum += tl.sum(q1.to(tl.float32) + q3.to(tl.float32), axis=1) * (16.0 * UNIT)
        factor = factor * (1.0 / (UNIT * D))
    elif not K_OWN:
        factor = factor * tl.load(k_scale_ptr + (head if K_PER_HEAD else 0))

    top, total = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)
    s0, s1 = tl.zeros([M, D // VE], tl.float32), tl.zeros([M, D // VE], tl.float32)
    if VE == 4:
        s2, s3, zeros = s0, s0, tl.zeros([M], tl.float32)
    k_ptr += first * KW
    v_ptr += first * VW
    k_words = k_ptr.to(tl.pointer_type(tl.uint16), bitcast=True)
    v_words = v_ptr.to(tl.pointer_type(tl.uint16), bitcast=True)
    k_scales = (k_ptr + 2 * (D // KE)).to(tl.pointer_type(tl.int32), bitcast=True)
    v_scales = (v_ptr + 2 * (D // VE)).to(tl.pointer_type(tl.int32), bitcast=True)
    for token in range(start, end, N):
        n = token + tl.arange(0, N)
        allowed = n < end
        # Loads without masks take half the instructions. Behind the end they load the last token again.
        n = tl.minimum(n, end - 1)
        k = tl.load(k_words + n[:, None] * (KW // 2) + kj[None, :])
        v = tl.load(v_words + n[:, None] * (VW // 2) + vj[None, :])
        scores = tl.dot(q1, tl.trans(_values(k, K, 1)), tl.dot(q0, tl.trans(_values(k, K, 0))))
        if KE == 4:
            scores = tl.dot(q3, tl.trans(_values(k, K, 3)), tl.dot(q2, tl.trans(_values(k, K, 2)), scores))
        if K_OWN:
            k_bits = tl.load(k_scales + n * (KW // 4))
            if KE == 4:
                scores -= (k_bits & 15).to(tl.float32)[None, :] * q_sum[:, None]
                k_bits &= -16
            scores *= bits_float(k_bits)[None, :]
        scores *= factor[:, None]
        if mask_ptr is not None:
            given = tl.load(mask_ptr + batch.to(tl.int64) * mask_batch + n)
            if mask_ptr.dtype.element_ty == tl.uint8:
                allowed = allowed & (given != 0)
            else:
                scores += (given.to(tl.float32) * 1.4426950408889634)[None, :]
        if V_OWN:
            v_bits = tl.load(v_scales + n * (VW // 4))
            scale = bits_float(v_bits & -16 if VE == 4 else v_bits)
            # A row that was never written has a scale of 0, and codes of 0.
            log_scale = _log2(tl.where(allowed & (scale != 0.0), scale, 1.0))
            scores += log_scale[None, :]
        scores = tl.where(allowed[None, :], scores, float("-inf"))
        new = tl.maximum(top, tl.max(scores, axis=1))
        safe = tl.where(new == float("-inf"), 0.0, new)  # no token so far: exp2(-inf) is 0
        p, back = tl.exp2(scores - (safe - 15.0)[:, None]), tl.exp2(top - safe)
        top = new
        total = total * back + tl.sum(p * tl.exp2(-log_scale)[None, :] if V_OWN else p, axis=1)
        rounded = p.to(tl.float16)
        s0 = tl.dot(rounded, _values(v, V, 0), s0 * back[:, None])
        s1 = tl.dot(rounded, _values(v, V, 1), s1 * back[:, None])
        if VE == 4:
            s2 = tl.dot(rounded, _values(v, V, 2), s2 * back[:, None])
            s3 = tl.dot(rounded, _values(v, V, 3), s3 * back[:, None])
            zeros = zeros * back + tl.sum(rounded.to(tl.float32) * (v_bits & 15).to(tl.float32)[None, :], axis=1)

    row = (bh * parts + part).to(tl.int64) * GROUP + g
    to = sums_ptr + row[:, None] * D + VE * vj[None, :]
    if VE == 4:
        s0, s1 = s0 * (1.0 / UNIT) - zeros[:, None], s1 * (0.0625 / UNIT) - zeros[:, None]
        tl.store(to + 2, s2 * (1.0 / UNIT) - zeros[:, None], mask=keep[:, None])
        tl.store(to + 3, s3 * (0.0625 / UNIT) - zeros[:, None], mask=keep[:, None])
    elif not V_OWN:
        static = tl.load(v_scale_ptr + (head if V_PER_HEAD else 0))
        s0, s1 = s0 * static, s1 * static
    tl.store(to, s0, mask=keep[:, None])
    tl.store(to + 1, s1, mask=keep[:, None])
    stats = sums_ptr + (tl.num_programs(0) * parts).to(tl.int64) * GROUP * D + row * 2
    tl.store(stats, top, mask=keep)
    tl.store(stats + 1, total, mask=keep)


@triton.jit(do_not_specialize=["parts"])
def _combine(
    sums_ptr, signs_ptr, out_ptr, parts,
    GROUP: tl.constexpr, D: tl.constexpr, V: tl.constexpr, S: tl.constexpr, MOST: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Join one query head's parts: sums under one maximum, divided, and rotated back where values are int4."""
    bh, g = tl.program_id(0) // GROUP, tl.program_id(0) % GROUP
    origin, d = bh.to(tl.int64) * parts, tl.arange(0, D)
    stats_ptr = sums_ptr + (tl.num_programs(0) * parts).to(tl.int64) * D
    s = tl.arange(0, MOST)
    at = stats_ptr + ((origin + s) * GROUP + g) * 2
    tops = tl.load(at, mask=s < parts, other=float("-inf"))
    top = tl.max(tops, axis=0)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.load(at + 1, mask=s < parts, other=0.0) * tl.exp2(tops - top), axis=0)
    y = tl.zeros([D], tl.float32)
    for first in range(0, parts, S):
        part = first + tl.arange(0, S)
        row, there = (origin + part) * GROUP + g, part < parts
        weight = tl.exp2(tl.load(stats_ptr + row * 2, mask=there, other=float("-inf")) - top)
        sums = tl.load(sums_ptr + row[:, None] * D + d[None, :], mask=there[:, None], other=0.0)
        y += tl.sum(sums * weight[:, None], axis=0)
    y = y / tl.where(total == 0.0, 1.0, total)
    y = tl.reshape(y, (1, D))
    if V == "int4-token-head":
        y = butterflies(y, 1, D, STEPS) * tl.load(signs_ptr + d)[None, :] * (1.0 / D)
    tl.store(out_ptr + tl.program_id(0).to(tl.int64) * D + d[None, :], y.to(tl.bfloat16))


@cache
def _signs(d: int, device: torch.device) -> Tensor:
    """Return (d,) float32, the signs of int4's rotation."""
    with torch.inference_mode(False):
        return signs(SIGNS, d, device).float()


@dataclass(frozen=True)
class Shape:
    """Tokens of a step, warps and pipeline stages of a program, and programs that a multiprocessor runs at a time."""

    tokens: int
    warps: int
    stages: int
    per_sm: int

    @classmethod
    def of(cls, k: KVFormat, v: KVFormat, d: int, group: int, tokens: int) -> Shape:
        """Return the fastest shape on an H200, by 4096 tokens of one sequence and 32768 of 16, 8 heads of 128.

        tokens: of all heads, for each multiprocessor.
        """
        if d > 128 or group > 16:
            return cls(64, 4, 3, 2)
        if tokens < SHORT:
            return cls(128, 4, 3 if "int4-token-head" in (k.name, v.name) else 2, 1)
        # One warp needs no barriers, but has to hold the sums of all dimensions in its registers.
        return cls(64, 4, 3, 4) if k.static and v.static else cls(32, 1, 3, 8)


@lru_cache(LAUNCHES)
def _attention(
    k: KVFormat, v: KVFormat, query: torch.Size, heads: int, per_head: tuple[bool, bool], scale: float, shape: Shape,
    parts: int,
) -> tuple[Launch, Launch]:  # fmt: skip
    batch, q_heads, _, d = query
    group = q_heads // heads
    attend = Launch(
        _attend, (batch * heads, parts), parts=parts, HEADS=heads, GROUP=group, D=d, K=k.name, V=v.name,
        KW=k.row_bytes(d) + k.scale_bytes, VW=v.row_bytes(d) + v.scale_bytes, K_PER_HEAD=per_head[0],
        V_PER_HEAD=per_head[1], SCALE=scale * LOG2E, M=max(16, triton.next_power_of_2(group)), N=shape.tokens,
        num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    combine = Launch(
        _combine, (batch * q_heads,), parts=parts, GROUP=group, D=d, V=v.name, S=16, MOST=PARTS,
        STEPS=d.bit_length() - 1, num_warps=4,
    )  # fmt: skip
    return attend, combine


def attend(
    query: Tensor, keys: Tensor, values: Tensor, k: KVFormat, v: KVFormat,
    k_scale: Tensor | None, v_scale: Tensor | None, mask: Tensor | None, scale: float,
) -> Tensor:  # fmt: skip
    """Return (batch, 1, heads, head_dim) bfloat16, the attention of one query token for each row of the batch.

    query: (batch, heads, 1, head_dim) bfloat16.
    keys, values: uint8 (batch, key-value heads, tokens, bytes of a row), of `KVFormat.pack`. Tokens lie side by side,
        heads and batch in even steps, the same for both.
    k_scale, v_scale: of static formats, float32, one or one for each head.
    mask: (batch or 1, 1, 1, tokens), bool that allows, or floats that are added.
    scale: of the softmax.
    """
    batch, heads, tokens, width = keys.shape
    query = query.contiguous()
    q_heads, d = query.shape[1], query.shape[3]
    device = query.device
    processors = multiprocessors(device)
    shape = Shape.of(k, v, d, q_heads // heads, batch * heads * tokens // processors)
    parts = max(1, min(triton.cdiv(tokens, shape.tokens), processors * shape.per_sm // (batch * heads), PARTS))
    per_head = (k_scale is not None and k_scale.numel() > 1, v_scale is not None and v_scale.numel() > 1)
    attend, combine = _attention(k, v, query.shape, heads, per_head, scale, shape, parts)
    flips = _signs(d, device) if "int4-token-head" in (k.name, v.name) else None
    sums = torch.empty(batch * q_heads * parts * (d + 2), dtype=torch.float32, device=device)
    out = torch.empty(batch, 1, q_heads, d, dtype=torch.bfloat16, device=device)
    if mask is not None and mask.dtype == torch.bool:
        mask = mask.view(torch.uint8)
    mask_batch = 0 if mask is None or mask.shape[0] == 1 else mask.stride(0)
    capacity = keys.stride(1) // width
    attend(query, keys, values, k_scale, v_scale, mask, flips, sums, tokens, capacity, mask_batch)
    combine(sums, flips, out)
    return out
