"""Scales that reach over a cut. The ranks take a maximum of integers, so that NaN survives.

A scale of a row or of the whole tensor depends on the smallest and the largest value alone (formats for which it does
not are refused, `Format.from_extremes`). Each rank finds the smallest and the largest value of its part, the ranks take
the largest of their bits, and the format measures these two values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aoquant.formats import Format, Scales


def extremes(format: Format, x_RK: Tensor) -> Tensor:
    """(R, 2), or (1, 2) for the reach "tensor", int32: how far values lie below and above 0, as bits that the numbers
    are ordered by.
    """
    grouped = x_RK.reshape(1, x_RK.numel()) if format.reach == "tensor" else x_RK
    if format.finite_only:
        grouped = grouped.nan_to_num(0.0, 0.0, 0.0)
    if grouped.shape[1]:  # every format that reaches so far has a code for 0, so 0 is within the extremes
        ends = torch.stack((-grouped.amin(1), grouped.amax(1)), 1).clamp(min=0)
    else:
        ends = grouped.new_zeros(grouped.shape[0], 2)
    return ends.float().abs().view(torch.int32)  # NaN, its sign gone, is above Inf


def measure(format: Format, bits: Tensor, dtype: torch.dtype) -> Scales:
    """Scales of a tensor of `dtype` from the maximum of its shards' `extremes`."""
    below, above = bits.view(torch.float32).to(dtype).unbind(1)
    return format.measure(torch.stack((-below, above), 1))
