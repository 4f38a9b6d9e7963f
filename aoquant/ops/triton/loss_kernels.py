"""Losses of logits over a large vocabulary: forward reads each matrix once, backward reads it once more.

A row's loss is KL(teacher || student). Where the teacher is a token, and no matrix of logits, that is cross entropy.
Forward keeps a running maximum and a sum for each lane of a program and joins them when the row ends, so no warp waits
for another inside the loop. A lane also sums exp(t - max) * (t - s) for teacher t and student s: the divergence is that
sum over the teacher's, plus the difference of both log-sums. Cross entropy is the log-sum less the token's logit.
Backward stores the gradient as soon as it is computed. Everything inside is float32 and no sum depends on timing.
`integrations/losses.py` has the same numbers in torch.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import LAUNCHES, Launch

_LOWEST = tl.constexpr(torch.finfo(torch.float32).min)  # a ruled-out token: 0 times it is no NaN, as 0 times -inf is
_LANES, _EACH = 1024, 8  # a thread loads 16 bytes of bfloat16 at once, and reduces them without another thread


@triton.jit
def _row_losses(
    student_ptr,
    teacher_ptr,  # or tokens
    found_ptr,
    student_stride,
    teacher_stride,
    V: tl.constexpr,
    TOKENS: tl.constexpr,
    IGNORED: tl.constexpr,
    LANES: tl.constexpr,
    EACH: tl.constexpr,
):
    row, rows = tl.program_id(0), tl.num_programs(0)
    student_ptr += tl.cast(row, tl.int64) * student_stride
    teacher_ptr += tl.cast(row, tl.int64) * teacher_stride
    most_q = tl.full([LANES], _LOWEST, tl.float32)  # not -inf, which less itself is NaN
    most_p = most_q
    sum_q = tl.zeros([LANES], tl.float32)
    sum_p, gap = sum_q, sum_q
    for start in range(0, V, LANES * EACH):
        at = start + tl.arange(0, LANES)[:, None] * EACH + tl.arange(0, EACH)[None, :]
        s = tl.load(student_ptr + at, mask=at < V, other=float("-inf")).to(tl.float32)
        higher_q = tl.maximum(most_q, tl.max(s, 1))
        sum_q = sum_q * tl.exp(most_q - higher_q) + tl.sum(tl.exp(s - higher_q[:, None]), 1)
        most_q = higher_q
        if not TOKENS:
            t = tl.load(teacher_ptr + at, mask=at < V, other=float("-inf")).to(tl.float32)
            higher_p = tl.maximum(most_p, tl.max(t, 1))
            rescale, e = tl.exp(most_p - higher_p), tl.exp(t - higher_p[:, None])
            sum_p = sum_p * rescale + tl.sum(e, 1)
            gap = gap * rescale + tl.sum(tl.where(e > 0, e * (t - tl.maximum(s, _LOWEST)), 0.0), 1)
            most_p = higher_p
    top_q = tl.max(most_q, 0)
    total_q = tl.sum(sum_q * tl.exp(most_q - top_q), 0)
    log_q = tl.log(total_q)
    tl.store(found_ptr + rows + row, top_q + log_q)
    if TOKENS:
        token = tl.load(teacher_ptr)
        one = tl.load(student_ptr + token, mask=(token >= 0) & (token < V), other=float("nan")).to(tl.float32)
        nats = top_q - one + log_q
    else:
        top_p = tl.max(most_p, 0)
        rescale = tl.exp(most_p - top_p)
        total_p = tl.sum(sum_p * rescale, 0)
        log_p = tl.log(total_p)
        nats = tl.sum(gap * rescale, 0) / total_p + (top_q - top_p) + (log_q - log_p)
        tl.store(found_ptr + 2 * rows + row, top_p + log_p)
    nats = tl.where(total_q > 0, nats, float("nan"))  # a student that rules out every token
    if TOKENS:
        nats = tl.where(token == IGNORED, 0.0, nats)
    tl.store(found_ptr + row, nats)


@triton.jit
def _gradient(
    student_ptr,
    teacher_ptr,  # or tokens
    found_ptr,
    scale_ptr,
    d_ptr,
    student_stride,
    teacher_stride,
    V: tl.constexpr,
    TOKENS: tl.constexpr,
    IGNORED: tl.constexpr,
    TILE: tl.constexpr,
):
    row, rows = tl.cast(tl.program_id(0), tl.int64), tl.num_programs(0)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    s = tl.load(student_ptr + row * student_stride + at, mask=at < V, other=0.0).to(tl.float32)
    q = tl.exp(s - tl.load(found_ptr + rows + row))
    if TOKENS:
        token = tl.load(teacher_ptr + row * teacher_stride)
        d = (q - tl.where(at == token, 1.0, 0.0)) * tl.load(scale_ptr)
        d = tl.where((token >= 0) & (token < V), d, tl.where(token == IGNORED, 0.0, float("nan")))
    else:
        t = tl.load(teacher_ptr + row * teacher_stride + at, mask=at < V, other=0.0).to(tl.float32)
        p = tl.exp(t - tl.load(found_ptr + 2 * rows + row))
        d = (q - p) * tl.load(scale_ptr)
    tl.store(d_ptr + row * V + at, d.to(d_ptr.dtype.element_ty), mask=at < V)


def row_losses(student_NV: Tensor, teacher: Tensor, ignored: int) -> Tensor:
    """Return (3, N) float32 of logits: the loss of each row in nats, the student's logarithm of the sum of
    exponentials, and the teacher's.

    teacher: logits (N, V), of KL(teacher || student); or int64 tokens (N,), of cross entropy, where `ignored` adds
        nothing. Other numbers that are no token of the vocabulary give NaN. Rows are contiguous.
    """
    found_3N = torch.empty(3, len(student_NV), device=student_NV.device)
    _losses_of(*_shape(student_NV, teacher), ignored)(student_NV, teacher, found_3N)
    return found_3N


def gradient(student_NV: Tensor, teacher: Tensor, found_3N: Tensor, scale: Tensor, ignored: int) -> Tensor:
    """Return (softmax(student) - softmax(teacher)) * scale in the student's dtype. found_3N: of `row_losses`. scale: a
    float32 scalar on the device.
    """
    d_NV = torch.empty(student_NV.shape, dtype=student_NV.dtype, device=student_NV.device)
    _gradient_of(*_shape(student_NV, teacher), ignored)(student_NV, teacher, found_3N, scale, d_NV)
    return d_NV


def _shape(student_NV: Tensor, teacher: Tensor) -> tuple[int, int, int, int, bool]:
    return *student_NV.shape, student_NV.stride(0), teacher.stride(0), teacher.dim() == 1


@lru_cache(LAUNCHES)
def _losses_of(rows: int, v: int, student_stride: int, teacher_stride: int, tokens: bool, ignored: int) -> Launch:
    how = {"student_stride": student_stride, "teacher_stride": teacher_stride, "V": v, "TOKENS": tokens}
    return Launch(_row_losses, (rows,), **how, IGNORED=ignored, LANES=_LANES, EACH=_EACH, num_warps=16)


@lru_cache(LAUNCHES)
def _gradient_of(rows: int, v: int, student_stride: int, teacher_stride: int, tokens: bool, ignored: int) -> Launch:
    how = {"student_stride": student_stride, "teacher_stride": teacher_stride, "V": v, "TOKENS": tokens}
    tile = 4096
    return Launch(_gradient, (rows, triton.cdiv(v, tile)), **how, IGNORED=ignored, TILE=tile, num_warps=8)
