"""Formats with one scale for the whole tensor, encoded by `csrc/encode_tensor.cu` in one launch: NVFP4 under a dynamic
outer scale, and e4m3.

Two kernels read x twice, once for the scale. This one keeps a part of x on the chip and finds most of the rest in the
cache. It needs every multiprocessor, so small tensors stay Triton's.
"""

import torch
from torch import Tensor

from aoquant.formats import Encoded, Format, Operand

from .. import native
from ..quantized import Side
from ..router import CodecRequest

LEAST = 1 << 21  # values


def has(operand: Operand) -> bool:
    """Return whether the kernel knows the operand."""
    return operand.name in ("nvfp4", "fp8-tensor", "fp8-tensor-native")


def why_not(r: CodecRequest) -> str | None:
    """Return why the kernel does not encode the request, of an operand that it `has`."""
    if r.rows * r.k < LEAST or r.k % 16:
        return f"encodes {LEAST} values or more of {r.operand.name}, in rows of a multiple of 16, got {r.rows} x {r.k}"
    if torch.cuda.get_device_capability(r.device)[0] < 9:
        return "copies by an engine that Hopper and later have"
    return native.why_not() or native.why_not_on(r.device)


def encode(format: Format, x_RK: Tensor, dtype: torch.dtype | None, operand: bool, keep: bool) -> Side:
    """Codes, if `keep`, and values in `dtype`, unless it is None; x starts on 16 bytes."""
    fp8 = format.block is None
    whole, *made = native.operator("encode_tensor")(x_RK, int(fp8), keep, native.OUT[dtype], operand)
    values = None if dtype is None else made.pop()
    if not keep:
        return Side(None, values, whole)
    codes, k = made[0], x_RK.shape[1]
    if fp8:
        return Side(Encoded(codes.view(torch.float8_e4m3fn), whole, None, None, k), values, whole)
    return Side(Encoded(codes, made[1].view(torch.float8_e4m3fn), None, whole, k), values, whole)
