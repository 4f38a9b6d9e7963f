"""Attend to a cache with int4 keys or values: the kernel of `kv_attend.py` for pairs with int4.

    S = (Q . code_k) * (softmax scale * s_k)      P = bf16(exp(S - max S) * s_v)      out = P . code_v / sum of exp

It converts codes byte by byte to bfloat16, where they are exact. int4 is multiplied in the rotated space where it is
stored, and `_combine` rotates the result back:

    Q' = bf16(Q D H)      S = (Q' . code - z sum Q') * (softmax scale * s / b)
"""

from __future__ import annotations

import triton
import triton.language as tl

from .element_codes import bits_float


@triton.jit
def _bf16(codes, KIND: tl.constexpr):
    """Convert uint8 codes to the bfloat16 numbers that they stand for, without their scale."""
    if KIND == "int8-token-head":
        return codes.to(tl.int8, bitcast=True).to(tl.bfloat16)
    if KIND == "fp8-e5m2":
        return codes.to(tl.float8e5, bitcast=True).to(tl.bfloat16)
    return codes.to(tl.float8e4nv, bitcast=True).to(tl.bfloat16)


@triton.jit
def _row_scales(ptr, n, inside, WIDTH: tl.constexpr):
    """Load the scales behind the codes of N tokens as bits, (N,) int32; 0 outside."""
    words = ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    return tl.load(words + n * (WIDTH // 4) + (WIDTH // 4 - 1), mask=inside, other=0)


@triton.jit(do_not_specialize=["tokens", "capacity", "mask_batch", "parts"])
def attend4(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, mask_ptr, turn_ptr, sums_ptr, tokens, capacity, mask_batch, parts,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KW: tl.constexpr,
    VW: tl.constexpr, K_PER_HEAD: tl.constexpr, V_PER_HEAD: tl.constexpr, SCALE: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """Store the sums and the statistics of one part; the arguments are those of `kv_attend._attend`, and turn_ptr is
    (D, D) bfloat16, D H.
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
            bits = tl.where(allowed, _row_scales(v_ptr, n, inside, VW), 0)  # NaN of a masked token stays out
            rounded = (p * bits_float(bits & -16)[None, :]).to(tl.bfloat16)
            sums = tl.dot(rounded, low, sums * back[:, None])
            odd_sums = tl.dot(rounded, high, odd_sums * back[:, None])
            zeros = zeros * back + tl.sum(rounded.to(tl.float32) * (bits & 15).to(tl.float32)[None, :], axis=1)
        else:
            codes = tl.load(v_ptr + n[:, None] * VW + d[None, :], mask=inside[:, None], other=0)
            if VW != D:
                p = p * bits_float(tl.where(allowed, _row_scales(v_ptr, n, inside, VW), 0))[None, :]
            sums = tl.dot(p.to(tl.bfloat16), _bf16(codes, V), sums * back[:, None])

    row = (bh * parts + part).to(tl.int64) * GROUP + g
    keep = g < GROUP
    stats = sums_ptr + (tl.num_programs(0) * parts).to(tl.int64) * GROUP * D + row * 2
    tl.store(stats, top, mask=keep)
    tl.store(stats + 1, total, mask=keep)
    if VW < D:
        to = sums_ptr + row[:, None] * D + 2 * half[None, :]
        tl.store(to, sums - zeros[:, None], mask=keep[:, None])
        tl.store(to + 1, odd_sums - zeros[:, None], mask=keep[:, None])
    else:
        if VW == D:
            sums = sums * tl.load(v_scale_ptr + (head if V_PER_HEAD else 0))
        tl.store(sums_ptr + row[:, None] * D + d[None, :], sums, mask=keep[:, None])
