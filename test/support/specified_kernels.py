"""Kernels that torchao calls and that need a GPU, written from their specification: torchao's own layers run over them
on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aoquant.formats import layout


def blockwise_fp8_gemm(a: Tensor, a_s: Tensor, b: Tensor, b_s: Tensor, block_size: int) -> Tensor:
    """torchao's Triton kernel on paper: (a block's float32 sum) * x's scale * w's scale, blocks added in order, one
    rounding.
    """
    assert all(t.is_contiguous() for t in (a, a_s, b, b_s))
    blocks = a.shape[1] // block_size
    a_s = a_s.view(len(a), blocks)
    y = torch.zeros(len(a), len(b))
    for i in range(blocks):
        k = slice(i * block_size, (i + 1) * block_size)
        y = y + a[:, k].float() @ b[:, k].float().t() * a_s[:, i, None] * b_s[torch.arange(len(b)) // block_size, i]
    return y.bfloat16()


def fp4_scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Any = None, out_dtype: Any = None
) -> Tensor:
    """`torch._scaled_mm` of two NVFP4 operands, as Blackwell has it: exact products, float32 sums, bias, one
    rounding.
    """

    def values(codes: Tensor, scale: Tensor) -> Tensor:
        grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
        bytes_ = codes.view(torch.uint8)
        v = grid[torch.stack((bytes_ & 15, bytes_ >> 4), -1).flatten(1).int()]
        block_scale = layout.unswizzle_128x4(scale.contiguous().flatten(), len(v), v.shape[1] // 16).float()
        return v * block_scale.repeat_interleave(16, 1)

    y = values(a, scale_a) @ values(b.t(), scale_b).t()
    return (y if bias is None else y + bias.float()).to(out_dtype)
