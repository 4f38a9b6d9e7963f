"""The emulated GEMM on tensor cores: operands that are exact in bf16, float32 accumulators, and the contract's
epilogue.

e2m1, e4m3 and integer codes times their block scales are exact in bf16, so a bf16 tensor core sums the very products
that an FP4 or FP8 one sums. The contract rounds the accumulator: without outer scales and bias cuBLAS's own
rounding is that rounding, and nothing is left to do; with them, a Triton GEMM does it in its epilogue
(`triton/matmul.py`). Where y has too few tiles to fill the chip, cuBLAS splits K, and might sum bf16 partial results;
there it hands over float32, and one small kernel scales, adds the bias and rounds.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from aoquant.formats import Float8

from .. import codec
from ..call import Call
from ..router import Backend, Request
from .reference import nvfp4_epilogue, rescale

_CONTRACTS = ("aoquant", "nvfp4_rescale")
_FULL = 128 * 256 * 128  # outputs that fill a large GPU with 128 x 256 tiles


def _why_not(r: Request) -> str | None:
    if r.contract not in _CONTRACTS:
        return f"computes {' and '.join(_CONTRACTS)}, not {r.contract}"
    if r.device.type != "cuda":
        return "needs a CUDA device"
    if isinstance(r.x_format, Float8) and r.x_format.block is not None and r.x_format.block == r.w_format.block:
        return f"sums whole rows, not the blocks of {r.x_format.name}"
    if r.dtype not in (torch.bfloat16, torch.float16):
        return f"multiplies bfloat16 or float16, got {r.dtype}"
    return None


@cache
def _kernels() -> tuple[Any, Any]:
    """The modules of the GEMM and of the epilogue alone: an import statement in a function costs as much as what
    follows it there.
    """
    from ..triton import epilogue, matmul

    return matmul, epilogue


def _run(c: Call) -> Tensor:
    x_MK, w_NK = c.x_matrix(), c.w_matrix()
    large = x_MK.shape[0] * w_NK.shape[0] >= _FULL
    if c.contract == "nvfp4_rescale":
        return nvfp4_epilogue(c, accumulate(x_MK, w_NK, large).to(c.dtype))
    if large and c.alpha_x is None and c.alpha_w is None and c.bias is None:
        return c.shaped(torch.mm(x_MK, w_NK.t()))
    if not codec.has_triton(x_MK.device):
        return rescale(c, accumulate(x_MK, w_NK, False))
    multiply, rescaled = _kernels()
    if large and multiply.why_not(x_MK, w_NK) is None:
        return c.shaped(multiply.matmul(x_MK, w_NK, c.alpha_x, c.alpha_w, c.bias))
    return c.shaped(rescaled.rescale(accumulate(x_MK, w_NK, False), c.alpha_x, c.alpha_w, c.bias, c.dtype))


def accumulate(x_MK: Tensor, w_NK: Tensor, rounded: bool) -> Tensor:
    """(M, N) sums of products: float32, or rounded once to the operands' dtype by the GEMM itself."""
    return torch.mm(x_MK, w_NK.t()) if rounded else torch.mm(x_MK, w_NK.t(), out_dtype=torch.float32)


BACKENDS = (Backend("tensor-cores", 5, _why_not, _run),)
