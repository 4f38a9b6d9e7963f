"""Attention of one query token over a cache of bytes: the codes are multiplied as they are, their scales afterwards.

    S = (Q . code_k) * (softmax scale * s_k)      P = bf16(exp(S - max S) * s_v)      out = P . code_v / sum of exp

Codes are exact in bfloat16, so no key or value is rounded after decoding; P is rounded to bfloat16 as in other
attention kernels, and sums are float32. Static scales of values multiply the sum instead of P. int4 is multiplied where
it is stored, in the rotated space: Q' = bf16(Q D H), S = (Q' . code - z sum Q') * (softmax scale * s / b), and the sum
is turned back. vLLM 0.33 computes the same (`triton_unified_attention`, `int4_per_token_head`).

A program takes one key-value head, the queries that share it, and one part of the tokens. `_combine` joins the parts.
The number of parts follows from batch, heads and tokens alone.
"""

from __future__ import annotations

from functools import cache, lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from aoquant.formats.kv import KVFormat, rotation

from .element_codes import bits_float
from .launch import LAUNCHES, Launch

PARTS = 128  # at most
PER_SM = 4  # programs that run on a multiprocessor at a time: with REGISTERS each, for rows of up to 128 values
REGISTERS = 128  # of a thread
TOKENS = 64  # of one step of a program
WARPS, STAGES = 4, 3
LOG2E = 1.4426950408889634


@triton.jit
def _bf16(codes, KIND: tl.constexpr):
    """uint8 codes -> the bfloat16 numbers that they stand for, without their scale."""
    if KIND == "int8-token-head":
        return codes.to(tl.int8, bitcast=True).to(tl.bfloat16)
    if KIND == "fp8-e5m2":
        return codes.to(tl.float8e5, bitcast=True).to(tl.bfloat16)
    return codes.to(tl.float8e4nv, bitcast=True).to(tl.bfloat16)


@triton.jit
def _row_scales(ptr, n, inside, WIDTH: tl.constexpr):
    """(N,) int32: the scales behind the codes of N tokens, as bits; 0 outside."""
    words = ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    return tl.load(words + n * (WIDTH // 4) + (WIDTH // 4 - 1), mask=inside, other=0)


@triton.jit(do_not_specialize=["tokens", "capacity", "mask_batch", "parts"])
def _attend(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, mask_ptr, turn_ptr, sums_ptr, stats_ptr, tokens, capacity, mask_batch,
    parts, HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KW: tl.constexpr,
    VW: tl.constexpr, K_PER_HEAD: tl.constexpr, V_PER_HEAD: tl.constexpr, SCALE: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """SCALE: of the softmax, times log2(e). M: queries of a program, at least GROUP. KW, VW: bytes of a row: D with a
    static scale, more with a scale of its own, fewer for int4. mask_ptr: (batch, 1, 1, tokens) uint8 that allows, or
    floats that are added; or None. turn_ptr: (D, D) bfloat16, D H.
    """
    bh, part = tl.program_id(0), tl.program_id(1)
    batch, head = bh // HEADS, bh % HEADS
    share = tl.cdiv(tl.cdiv(tokens, parts), N) * N
    start = part * share
    end = tl.minimum(start + share, tokens)
    first = bh.to(tl.int64) * capacity

    g, d, half = tl.arange(0, M), tl.arange(0, D), tl.arange(0, D // 2)
    q = tl.load(q_ptr + (bh * GROUP + g)[:, None] * D + d[None, :], mask=(g < GROUP)[:, None], other=0.0)
    if KW < D:
        turn = turn_ptr + d[:, None] * D + 2 * half[None, :]
        q_even, q_odd = tl.dot(q, tl.load(turn)).to(tl.bfloat16), tl.dot(q, tl.load(turn + 1)).to(tl.bfloat16)
        q_sum = tl.sum(q_even.to(tl.float32), axis=1) + tl.sum(q_odd.to(tl.float32), axis=1)
    factor = tl.full([], SCALE, tl.float32)
    if KW < D:
        factor = factor / D
    if KW == D:
        factor = factor * tl.load(k_scale_ptr + (head if K_PER_HEAD else 0))

    top, total = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)
    sums = tl.zeros([M, D // 2 if VW < D else D], tl.float32)
    if VW < D:
        odd_sums, zeros = tl.zeros([M, D // 2], tl.float32), tl.zeros([M], tl.float32)
    k_ptr += first * KW
    v_ptr += first * VW
    for token in range(start, end, N):
        n = token + tl.arange(0, N)
        inside = n < end
        if KW < D:
            packed = tl.load(k_ptr + n[:, None] * KW + half[None, :], mask=inside[:, None], other=0)
            low, high = (packed & 15).to(tl.int8).to(tl.bfloat16), (packed >> 4).to(tl.int8).to(tl.bfloat16)
            bits = _row_scales(k_ptr, n, inside, KW)
            scores = tl.dot(q_odd, tl.trans(high), tl.dot(q_even, tl.trans(low)))
            scores = scores - (bits & 15).to(tl.float32)[None, :] * q_sum[:, None]
            scores = scores * (bits_float(bits & -16) * factor)[None, :]
        else:
            codes = tl.load(k_ptr + n[:, None] * KW + d[None, :], mask=inside[:, None], other=0)
            scores = tl.dot(q, tl.trans(_bf16(codes, K)))
            if KW == D:
                scores = scores * factor
            else:
                scores = scores * (bits_float(_row_scales(k_ptr, n, inside, KW)) * factor)[None, :]
        allowed = inside
        if mask_ptr is not None:
            given = tl.load(mask_ptr + batch.to(tl.int64) * mask_batch + n, mask=inside, other=0)
            if mask_ptr.dtype.element_ty == tl.uint8:
                allowed = inside & (given != 0)
            else:
                scores = scores + (given.to(tl.float32) * 1.4426950408889634)[None, :]
        scores = tl.where(allowed[None, :], scores, float("-inf"))
        new = tl.maximum(top, tl.max(scores, axis=1))
        safe = tl.where(new == float("-inf"), 0.0, new)  # no token so far: exp2(-inf) is 0
        p, back = tl.exp2(scores - safe[:, None]), tl.exp2(top - safe)
        top, total = new, total * back + tl.sum(p, axis=1)
        if VW < D:
            packed = tl.load(v_ptr + n[:, None] * VW + half[None, :], mask=inside[:, None], other=0)
            low, high = (packed & 15).to(tl.int8).to(tl.bfloat16), (packed >> 4).to(tl.int8).to(tl.bfloat16)
            bits = _row_scales(v_ptr, n, inside, VW)
            rounded = (p * bits_float(bits & -16)[None, :]).to(tl.bfloat16)
            sums = tl.dot(rounded, low, sums * back[:, None])
            odd_sums = tl.dot(rounded, high, odd_sums * back[:, None])
            zeros = zeros * back + tl.sum(rounded.to(tl.float32) * (bits & 15).to(tl.float32)[None, :], axis=1)
        else:
            codes = tl.load(v_ptr + n[:, None] * VW + d[None, :], mask=inside[:, None], other=0)
            if VW != D:
                p = p * bits_float(_row_scales(v_ptr, n, inside, VW))[None, :]
            sums = tl.dot(p.to(tl.bfloat16), _bf16(codes, V), sums * back[:, None])

    row = (bh * parts + part).to(tl.int64) * GROUP + g
    keep = g < GROUP
    tl.store(stats_ptr + row * 2, top, mask=keep)
    tl.store(stats_ptr + row * 2 + 1, total, mask=keep)
    if VW < D:
        to = sums_ptr + row[:, None] * D + 2 * half[None, :]
        tl.store(to, sums - zeros[:, None], mask=keep[:, None])
        tl.store(to + 1, odd_sums - zeros[:, None], mask=keep[:, None])
    else:
        if VW == D:
            sums = sums * tl.load(v_scale_ptr + (head if V_PER_HEAD else 0))
        tl.store(sums_ptr + row[:, None] * D + d[None, :], sums, mask=keep[:, None])


@triton.jit(do_not_specialize=["parts"])
def _combine(
    sums_ptr, stats_ptr, turn_ptr, out_ptr, parts,
    GROUP: tl.constexpr, D: tl.constexpr, V4: tl.constexpr, S: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Join one query head's parts: sums under one maximum, divided, and turned back where values are int4."""
    bh, g = tl.program_id(0) // GROUP, tl.program_id(0) % GROUP
    origin, d = bh.to(tl.int64) * parts, tl.arange(0, D)
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
    out_ptr += tl.program_id(0).to(tl.int64) * D
    if V4:
        for first in tl.static_range(0, D, 32):
            i = first + tl.arange(0, 32)
            turn = tl.load(turn_ptr + i[:, None] * D + d[None, :]).to(tl.float32)
            tl.store(out_ptr + i, (tl.sum(turn * y[None, :], axis=1) * (1.0 / D)).to(tl.bfloat16))
    else:
        tl.store(out_ptr + d, y.to(tl.bfloat16))


@cache
def _turn(d: int, device: torch.device) -> Tensor:
    """(d, d) bfloat16: what int4 rows are multiplied by before they are rounded."""
    with torch.inference_mode(False):
        return rotation(d, device).to(torch.bfloat16)


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@lru_cache(LAUNCHES)
def _attention(
    k: KVFormat, v: KVFormat, shape: torch.Size, heads: int, per_head: tuple[bool, bool], scale: float, parts: int
) -> tuple[Launch, Launch]:
    batch, q_heads, _, d = shape
    group = q_heads // heads
    attend = Launch(
        _attend, (batch * heads, parts), parts=parts, HEADS=heads, GROUP=group, D=d, K=k.name, V=v.name,
        KW=k.row_bytes(d) + k.scale_bytes, VW=v.row_bytes(d) + v.scale_bytes,
        K_PER_HEAD=per_head[0], V_PER_HEAD=per_head[1], SCALE=scale * LOG2E, M=max(16, triton.next_power_of_2(group)),
        N=TOKENS, num_warps=WARPS, num_stages=STAGES, **({"maxnreg": REGISTERS} if d <= 128 else {}),
    )  # fmt: skip
    combine = Launch(
        _combine, (batch * q_heads,), parts=parts, GROUP=group, D=d, V4=v.name == "int4-token-head", S=16, MOST=PARTS,
        num_warps=4,
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
    parts = max(
        1, min(triton.cdiv(tokens, TOKENS), _processors(device) * (PER_SM if d <= 128 else 2) // (batch * heads), PARTS)
    )
    per_head = (k_scale is not None and k_scale.numel() > 1, v_scale is not None and v_scale.numel() > 1)
    attend, combine = _attention(k, v, query.shape, heads, per_head, scale, parts)
    turn = _turn(d, device) if "int4-token-head" in (k.name, v.name) else None
    sums = torch.empty(batch * q_heads * parts * d, dtype=torch.float32, device=device)
    stats = torch.empty(batch * q_heads * parts * 2, dtype=torch.float32, device=device)
    out = torch.empty(batch, 1, q_heads, d, dtype=torch.bfloat16, device=device)
    if mask is not None and mask.dtype == torch.bool:
        mask = mask.view(torch.uint8)
    mask_batch = 0 if mask is None or mask.shape[0] == 1 else mask.stride(0)
    attend(query, keys, values, k_scale, v_scale, mask, turn, sums, stats, tokens, keys.stride(1) // width, mask_batch)
    combine(sums, stats, turn, out)
    return out
