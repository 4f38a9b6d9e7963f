"""How far a Hopper tensor core's float32 sum of bf16 products may be from the exact one. Derived from the model in
tensor_core.py.

One wgmma instruction aligns 16 products and the accumulator to their largest exponent e and drops what lies below
2^(e - 25): at most one quantum for each of 17 terms. It then chops the sum to 23 bits of fraction: 2^-23 of it. 2^e is
at most the largest of the terms, since normal significands are at least 1, and no term and no partial sum exceeds S =
sum |x_k w_k| (but for factors 1 + 2^-23, which the slack of the last term covers). So an instruction adds at most (17 /
4 + 1) 2^-23 S, and where a GEMM splits K and adds the parts in float32, there are fewer parts than instructions, each
addition rounding by 2^-24 S:

    |acc - sum x_k w_k|  <=  ceil(K / 16) * (17 * 2^-25 + 2^-23 + 2^-24) * S

The bound is nearly reached: a 1 followed by products just below 2^-25 loses all of them, 16/23 of it. Its relative form
needs operands that are normal bf16 numbers or zero, as every decoded code is unless its scale is below 2^-120.
"""

from __future__ import annotations

import torch
from torch import Tensor

INSTRUCTION = 17 * 2.0**-25 + 2.0**-23 + 2.0**-24


def bound(x_MK: Tensor, w_NK: Tensor) -> Tensor:
    """(M, N) float64: how far a sum on tensor cores may be from the exact one."""
    return -(-x_MK.shape[1] // 16) * INSTRUCTION * (x_MK.double().abs() @ w_NK.double().abs().t())


def adversarial(kind: str, m: int, k: int, device: torch.device | str = "cpu") -> Tensor:
    """(m, k) bf16 rows that a block format keeps as they are, or nearly.

    dust: 1, then values that vanish beside it, then -1: everything that counts is dropped. same sign: truncation never
        cancels.
    cancel: large values and their negatives at random places. spread: magnitudes over 24 binades. normal: for
        comparison.
    """
    g = torch.Generator().manual_seed(7)
    x = torch.randn(m, k, generator=g)
    if kind == "dust":
        x = torch.full((m, k), 2.0**-13)
        x[:, :32], x[:, -32:] = 0.0, 0.0
        x[:, 0], x[:, -1] = 1.0, -1.0
    elif kind == "same sign":
        x = x.abs() + 0.1
    elif kind == "cancel":
        half = x[:, : k // 2] * 2.0**10
        x = torch.cat((half, -half.roll(32, 1)), 1)[:, torch.arange(k).view(2, -1, 32).transpose(0, 1).flatten()]
    elif kind == "spread":
        x = x * 2.0 ** torch.randint(-12, 13, (m, k // 32, 1), generator=g).expand(-1, -1, 32).reshape(m, k)
    return x.bfloat16().to(device)


KINDS = ("dust", "same sign", "cancel", "spread", "normal")
