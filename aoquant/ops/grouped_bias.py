"""Biases of stacked experts: added to rows that are sorted by expert, and their gradient.

    y[s] = rn(x[s] + b[e])        db[e] = rn(sum over rows s of e of dy[s]), float32 sums

PyTorch would compute the first as `x + b[expert]`. That writes a matrix of biases, and its gradient adds one row after
the other, rounding each sum to bfloat16. Here a row of b is read where it is added, and an expert's rows are summed in
float32, side by side.
"""

from itertools import pairwise

import torch
from torch import Tensor

from . import codec
from .define import op


@op(lambda a: torch.empty_like(a.x_SN))
def grouped_bias(x_SN: Tensor, bias_EN: Tensor, expert: Tensor) -> Tensor:
    """(S, N): x plus each row's bias, rounded once, in their dtype. expert: (S,) int64."""
    if codec.has_triton(x_SN.device) and x_SN.numel():
        from .triton import grouped_bias_kernels as kernels

        return kernels.add(x_SN.contiguous(), bias_EN.contiguous(), expert)
    return x_SN + bias_EN[expert]


@op(lambda a: a.grad_SN.new_empty(a.ends.shape[0], a.grad_SN.shape[1]))
def grouped_bgrad(grad_SN: Tensor, ends: Tensor) -> Tensor:
    """(E, N): for each expert the sum of its rows, in float32, rounded once to their dtype; zero of none.

    ends: (E,) int32, the row behind each expert's last.
    """
    if codec.has_triton(grad_SN.device) and grad_SN.numel():
        from .triton import grouped_bias_kernels as kernels

        return kernels.summed(grad_SN.contiguous(), ends).to(grad_SN.dtype)
    sums = [grad_SN[a:b].float().sum(0) for a, b in pairwise([0, *ends.tolist()])]
    return torch.stack(sums).to(grad_SN.dtype)
