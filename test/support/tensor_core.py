"""A CPU model of Hopper's tensor core, bit for bit: the oracle for kernels that CI cannot run.

One wgmma instruction adds `depth` products to the accumulator (16 in bf16, 32 in e4m3). It aligns them all to the
largest exponent of the set, drops what lies more than F bits below it, adds the rest exactly and rounds toward zero:

    quantum = 2^(max exponent - F);  acc = chop(sum(trunc(term / quantum)) * quantum)

F is 25 for bf16 operands, 13 for e4m3, where the accumulator keeps no more than 13 bits of fraction either. A product's
exponent is the sum of its factors' and is not normalised, so 1.5 * 1.5 has exponent 0. Subnormals have their format's
smallest exponent; zeros have -126.

Source: arXiv:2511.10909 (MMA-Sim); checked against kernels recorded on an H200.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ZERO_EXPONENT = -126


@dataclass(frozen=True)
class TensorCore:
    """depth: products an instruction. fraction: bits of an operand's fraction; lowest: its smallest exponent.

    aligned: F above. kept: bits of fraction that the accumulator keeps.
    """

    dtype: torch.dtype
    depth: int
    fraction: int
    lowest: int
    aligned: int
    kept: int


BF16 = TensorCore(torch.bfloat16, 16, 7, -126, 25, 23)
E4M3 = TensorCore(torch.float8_e4m3fn, 32, 3, -6, 13, 13)


def matmul(a_MK: Tensor, b_NK: Tensor, core: TensorCore) -> Tensor:
    """float32 accumulators (M, N) of a b^T, instructions in K's order; finite operands, K a multiple of core.depth."""
    assert a_MK.dtype == b_NK.dtype == core.dtype and a_MK.shape[1] % core.depth == 0
    a, b = _split(a_MK.float(), core.fraction, core.lowest), _split(b_NK.float(), core.fraction, core.lowest)
    acc = torch.zeros(a_MK.shape[0], b_NK.shape[0])
    for k in range(0, a_MK.shape[1], core.depth):
        at = slice(k, k + core.depth)
        acc = _instruction(acc, a[0][:, at], a[1][:, at], b[0][:, at], b[1][:, at], core)
    return acc


def _split(x: Tensor, fraction: int, lowest: int) -> tuple[Tensor, Tensor]:
    """x = significand * 2^(exponent - fraction), both int64."""
    exponent = (torch.frexp(x).exponent.long() - 1).clamp(min=lowest)
    significand = torch.ldexp(x.double(), fraction - exponent).long()
    return significand, torch.where(x == 0, ZERO_EXPONENT, exponent)


def _instruction(acc_MN: Tensor, a_Mk: Tensor, a_exp: Tensor, b_Nk: Tensor, b_exp: Tensor, core: TensorCore) -> Tensor:
    product_MNk = a_Mk.unsqueeze(1) * b_Nk
    exponent_MNk = a_exp.unsqueeze(1) + b_exp
    c_MN, c_exp = _split(acc_MN, 23, ZERO_EXPONENT)
    top_MN = torch.maximum(exponent_MNk.amax(-1), c_exp)
    aligned = _shift(product_MNk, core.aligned - 2 * core.fraction + exponent_MNk - top_MN.unsqueeze(-1))
    total = aligned.sum(-1) + _shift(c_MN, core.aligned - 23 + c_exp - top_MN)
    # toward zero to `kept` bits of fraction, of which a float64 holds every one
    length = torch.frexp(total.abs().double()).exponent.long()
    extra = (length - 1 - core.kept).clamp(min=0)
    return torch.ldexp(_shift(_shift(total, -extra), extra).double(), top_MN - core.aligned).float()


def _shift(x: Tensor, by: Tensor) -> Tensor:
    """x * 2^by toward zero, for int64."""
    by = by.clamp(-62, 62)
    magnitude = torch.where(by >= 0, x.abs() << by.clamp(min=0), x.abs() >> (-by).clamp(min=0))
    return magnitude * x.sign()
