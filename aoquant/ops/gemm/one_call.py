"""A packed linear layer as one operator of csrc, `aoquant_native::linear`: the encoding of x, the product, the bias and
the shapes, without Python between the launches. For few rows of a 4-bit weight, and for any number of an fp8 one.

It is no backend: the router chooses the codec's and the GEMM's, and where it chooses csrc's encoder and csrc's decoding
GEMM, or csrc's encoder and torch's `_scaled_mm`, this operator makes those same launches. Recipe and weight are said by one
integer, because each argument of an operator costs the caller's time.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from aoquant.formats import Encoded, Format, GridFlip, Operand

from .. import native
from ..call import gemm_request
from ..router import CodecRequest, runner
from .few_rows import CUDA_FORMATS, CUDA_ROWS, is_aligned, kind

NAME = "aoquant_native::linear"
ROWS = CUDA_ROWS  # of 4-bit weights
_TYPES = (torch.bfloat16, torch.float16)
_FAST_FP8 = "fp8_scaled_mm"
Step = Callable[[Tensor, Tensor | None], Tensor]


def number(contract: str, x_as: Operand | None, w_as: Operand, w: Encoded, dtype: torch.dtype, m: int) -> int | None:
    """What tells the operator how to multiply m rows by W; None where it is not made for them, or would not be what the
    router chooses.
    """
    f = w_as.format
    if (m > ROWS and f.bits < 8) or dtype not in _TYPES or native.why_not("linear") is not None:
        return None
    found = runner(gemm_request(contract, x_as, w_as, w, dtype, m)).name
    if found == "torch._scaled_mm":
        if f.name != "fp8-row" or not _encoded_here("encode", x_as, w, dtype, m):
            return None
        return native.LINEAR_FP8 | native.ROW_FORMATS["fp8-row"] << 4 | (contract == _FAST_FP8) << 17
    if found != "cuda-decode" or not all(t is None or is_aligned(t) for t in (w.codes, w.scale, w.zero)):
        return None
    how = kind(f)
    if how is None or f.block is None or f.alpha(w) is not w.outer:
        return None  # a factor that is made of the outer scale is made anew in each call
    if x_as is not None and not _encoded_here("quantize", x_as, w, dtype, m):
        return None
    encodes = 0 if x_as is None else native.ROW_FORMATS[x_as.name]
    shift, alternating = (f.c, f.alternating) if isinstance(f, GridFlip) else (0.0, False)
    return (
        CUDA_FORMATS[how]
        | encodes << 4
        | (f.block.bit_length() - 1) << 8
        | (f.tile_rows.bit_length() - 1) << 13
        | alternating << 16
        | int(struct.unpack("I", struct.pack("f", shift))[0]) << 20
    )


def _encoded_here(role: str, x_as: Operand | None, w: Encoded, dtype: torch.dtype, m: int) -> bool:
    """Whether csrc's encoder of rows is what encodes m rows of x."""
    if x_as is None or x_as.name not in native.ROW_FORMATS:
        return False
    return runner(CodecRequest(role, x_as, w.codes.device, dtype, m, w.k, role == "encode")).name == "cuda"


def _arguments(f: Format, w: Encoded) -> tuple[Any, ...]:
    """codes, scale, zero and alpha_w of the operator: views of W's tensors."""
    assert w.scale is not None
    if f.name == "fp8-row":
        return w.codes.t(), w.scale.t(), None, None
    return w.codes, w.scale, w.zero, w.outer


def step(plan: int, f: Format, w: Encoded, dtype: torch.dtype, general: Step) -> Step:
    """(x (*lead, K), bias) -> y (*lead, N). general: for a bias that the operator does not take, and where torch has no kernel for it."""
    call, parts = native.operator("linear"), _arguments(f, w)
    if plan & 15 == native.LINEAR_FP8:
        return _fp8_step(plan, parts, dtype, general)

    def multiplied(x: Tensor, bias: Tensor | None) -> Tensor:
        if bias is not None and not _takes(bias, dtype):
            return general(x, bias)
        y: Tensor = call(x, *parts, bias, plan)
        return y

    return multiplied


def _fp8_step(plan: int, parts: tuple[Any, ...], dtype: torch.dtype, general: Step) -> Step:
    """torch looks for cuBLAS's algorithm in every call, which costs ten launches; csrc remembers it. That the bits are the
    same is seen at a shape's first product.
    """
    call = native.operator("linear")
    chosen: dict[torch.dtype | None, int] = {}  # by the type of the bias

    def multiplied(x: Tensor, bias: Tensor | None) -> Tensor:
        of = None if bias is None else bias.dtype
        number = chosen.get(of)
        if number is None:
            if bias is not None and not _takes(bias, dtype):
                number = _GENERAL
            elif torch.cuda.is_current_stream_capturing():
                return general(x, bias)
            else:
                number = _trusted(call, plan, x, parts, bias)
            chosen[of] = number
        if number == _GENERAL or (bias is not None and not bias.is_contiguous()):
            return general(x, bias)
        y: Tensor = call(x, *parts, bias, number)
        return y

    return multiplied


_GENERAL, _REMEMBERS = -1, 1 << 18  # the general way; a bit of the plan, as csrc/linear.cu
_verdicts: dict[tuple[Any, ...], int] = {}


def _trusted(call: Callable[..., Tensor], plan: int, x: Tensor, parts: tuple[Any, ...], bias: Tensor | None) -> int:
    """The plan with csrc's memory of algorithms where a product of this shape has torch's bits, else the plan as it is;
    _GENERAL where torch has no kernel.
    """
    n, m = parts[0].shape[1], x.numel() // x.shape[-1]
    key = plan, x.device, x.dtype, m, n, x.shape[-1], None if bias is None else bias.dtype
    if key not in _verdicts:
        some = torch.arange(x.numel(), device=x.device, dtype=torch.int32) * 40503 % 4099 - 2049
        like = some.to(x.dtype).view(x.shape)
        try:
            theirs = call(like, *parts, bias, plan)
        except RuntimeError:
            _verdicts[key] = _GENERAL
            return _GENERAL
        try:
            mine = call(like, *parts, bias, plan | _REMEMBERS)
        except RuntimeError:
            _verdicts[key] = plan
            return plan
        if not int((theirs != 0).sum()) * 2 > theirs.numel():
            return plan  # zeros prove nothing
        _verdicts[key] = plan | _REMEMBERS if torch.equal(mine.view(torch.int16), theirs.view(torch.int16)) else plan
    return _verdicts[key]


def _takes(bias: Tensor, dtype: torch.dtype) -> bool:
    return bias.dtype in (dtype, torch.float32) and bias.is_contiguous()
