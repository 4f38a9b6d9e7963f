"""A packed linear layer of few rows as one operator of csrc, `aoquant_native::linear`: the encoding of x, the product,
the bias and the shapes, without Python between the launches.

It is no backend: the router chooses the codec's and the GEMM's, and where it chooses csrc's encoder and csrc's decoding
GEMM, this operator makes those same launches. Recipe and weight are said by one integer (ops/linear_plan.py).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from aoquant.formats import Encoded, Format, Operand

from .. import native
from ..call import gemm_request
from ..linear_plan import ROW_FORMATS
from ..router import CodecRequest, runner
from .few_rows import CUDA_ROWS, alpha_of, kind, plan_of

NAME = "aoquant_native::linear"
MOST_ROWS = CUDA_ROWS  # for which the number made for one row is valid
_TYPES = (torch.bfloat16, torch.float16)
Multiplier = Callable[[Tensor, Tensor | None], Tensor]


def number(contract: str, x_as: Operand | None, w_as: Operand, w: Encoded, dtype: torch.dtype, m: int) -> int | None:
    """Return what tells the operator how to multiply m rows by W; None where it is not made for them, or would not be
    what the router chooses.
    """
    f = w_as.format
    how = kind(f)
    if how is None or dtype not in _TYPES or native.why_not() is not None:
        return None
    if runner(gemm_request(contract, x_as, w_as, w, dtype, m)).name != "cuda-decode":
        return None
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
