"""csrc's product of few rows, the backend "cuda-decode", and a linear layer of few rows as one operator,
`aoquant_native::linear`: the encoding of x, the product, the bias and the shapes, without Python between the launches.

The router chooses the codec's backend and the GEMM's. Where it chooses csrc's encoder and csrc's product, and no other
reader wants x's codes, the operator makes those same launches. Recipe and weight are said by one integer
(ops/linear_plan.py).
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from aoquant.formats import Encoded, Format, Operand

from .. import native
from ..call import Call, gemm_request, of_product
from ..linear_plan import ROW_FORMATS
from ..router import CodecRequest, runner
from .few_rows import CUDA_ROWS, alpha_of, cuda_product, kind, plan_of, why_not_cuda

DECODE = "cuda-decode"
NAME = "aoquant_native::linear"
MOST_ROWS = CUDA_ROWS  # for which the number made for one row is valid
_TYPES = (torch.bfloat16, torch.float16)
Multiplier = Callable[[Tensor, Tensor | None], Tensor]  # (x (..., K), bias) -> y (..., N)


def number(contract: str, x_as: Operand | None, w_as: Operand, w: Encoded, dtype: torch.dtype, m: int) -> int | None:
    """Return what tells the operator how to multiply m rows by W; None where it is not made for them, or would not be
    what the router chooses.
    """
    if kind(w_as.format) is None or dtype not in _TYPES or native.why_not() is not None:
        return None
    if runner(gemm_request(contract, x_as, w_as, w, dtype, m)).name != DECODE:
        return None
    return _number(x_as, w_as.format, w, dtype, m)


def _number(x_as: Operand | None, f: Format, w: Encoded, dtype: torch.dtype, m: int) -> int | None:
    """Return `number` of a product that is csrc's."""
    reads_as_it_lies = all(t is None or native.is_aligned(t) for t in (w.codes, w.scale, w.zero))
    if not reads_as_it_lies or f.alpha(w) is not alpha_of(f, w):
        return None  # a factor that is made of the outer scale is made anew in each call
    if x_as is not None and not _encoded_here(x_as, w, dtype, m):
        return None
    return plan_of(f, w, dtype, None if x_as is None else x_as.name)


def _encoded_here(x_as: Operand, w: Encoded, dtype: torch.dtype, m: int) -> bool:
    """Return whether csrc's encoder of rows is what encodes m rows of x."""
    if x_as.name not in ROW_FORMATS:
        return False
    return runner(CodecRequest("quantize", x_as, w.codes.device, dtype, m, w.k, False, True)).name == "cuda"


def multiplier(plan: int, f: Format, w: Encoded, dtype: torch.dtype, general: Multiplier) -> Multiplier:
    """(x (*lead, K), contiguous bias) -> y (*lead, N). general: for a bias that the operator does not take."""
    call, codes, scale, zero, alpha = native.operator("linear"), w.codes, w.scale, w.zero, alpha_of(f, w)

    def multiplied(x: Tensor, bias: Tensor | None) -> Tensor:
        if bias is not None and bias.dtype not in (dtype, torch.float32):
            return general(x, bias)
        return call(x, codes, scale, zero, alpha, bias, plan)

    return multiplied


def _run(c: Call) -> Tensor:
    """Multiply; x that is not encoded goes to the operator of a whole layer."""
    if isinstance(c.given_x, Tensor):
        plan = _number(c.x_operand, c.w_format, c.w, c.dtype, c.given_x.numel() // c.k)
        if plan is not None:
            return multiplier(plan, c.w_format, c.w, c.dtype, lambda *_: _PRODUCT.run(c))(c.given_x, c.bias)
    return _PRODUCT.run(c)


_PRODUCT = of_product(DECODE, 8, why_not_cuda, cuda_product, reads=native.is_aligned)
BACKENDS = (replace(_PRODUCT, run=_run),)
