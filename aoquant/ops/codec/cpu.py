"""int4 and int8 operands, int4 weights and int8 activations, by the kernels of `csrc/cpu/`: the codec's backend "cpu".

Decoding in plain PyTorch is a dozen passes over float32 values, encoding a row two dozen small calls; here both are one
pass and one call. The numbers are those of `formats/`, to the last bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aoquant.formats import Affine, Encoded, Format, Int4, Operand, Random

from .. import native_cpu
from ..router import Backend, CodecRequest, CodesAndValues
from . import reference

_DTYPES = (torch.bfloat16, torch.float32)
_ROWS = ("int8-row", "int8-row-asym")


def _why_not(r: CodecRequest) -> str | None:
    if r.device.type != "cpu":
        return "its kernels are for CPUs"
    if r.dtype not in _DTYPES or r.rows == 0 or r.k == 0:
        return f"takes bfloat16 or float32 matrices with values in them, got {r.rows} x {r.k} of {r.dtype}"
    if r.operand.transform is not None:
        return "knows no transform"
    return None


def _why_not_decode(r: CodecRequest) -> str | None:
    if (reason := _why_not(r)) is not None:
        return reason
    f = r.operand.format
    if native_cpu.kind(f) is None:
        return f"decodes int4 and int8, not {f.name}"
    if r.k % 32 or (f.block or 32) % 32:
        return f"decodes K and groups that are multiples of 32, not K = {r.k} of {f.name}"
    return native_cpu.why_not()


def _why_not_encode(r: CodecRequest) -> str | None:
    if (reason := _why_not(r)) is not None:
        return reason
    if not _is_int4(r.operand) and (type(r.operand.format) is not Affine or r.operand.name not in _ROWS):
        return f"encodes int4 and {' and '.join(_ROWS)}, not {r.operand.name}"
    return native_cpu.why_not()


def _is_int4(operand: Operand) -> bool:
    """With scales in the type of what is encoded, and groups of whole chunks."""
    f = operand.format
    return type(f) is Int4 and f.scales == "input" and f.group % 32 == 0


def decode(format: Format, e: Encoded, dtype: torch.dtype, operand: bool, out: torch.dtype) -> Tensor:
    """`format.operand(e, dtype)` or `format.decode(e, dtype)`, then cast to `out`."""
    told = native_cpu.told(format, e, dtype)
    if told is None or out not in _DTYPES or not (operand or native_cpu.kind(format) != "int8"):
        return reference.decode(format, e, dtype, operand, out)
    narrow = out == torch.bfloat16 and dtype == torch.bfloat16
    made: Tensor = native_cpu.operator("decode")(told.codes, told.scale, told.zero, told.kind, told.group, narrow)
    return made.to(out)


def encode(operand: Operand, x_RK: Tensor) -> Encoded:
    """`operand.encode(x_RK)`."""
    if isinstance(f := operand.format, Int4):
        codes, scale, zero = native_cpu.operator("encode_int4")(x_RK.contiguous(), f.group)
        return Encoded(codes, scale, zero, None, x_RK.shape[1])
    made = _rows(operand, x_RK, False).encoded
    assert made is not None
    return made


def encode_with_values(
    made: Operand,
    x_RK: Tensor,
    dtype: torch.dtype,
    operand: bool,
    keep: bool,
    measured: Tensor | None = None,
    random: Random | None = None,
) -> CodesAndValues:
    """Codes, and the operand in the same pass."""
    if isinstance(made.format, Int4):
        e = encode(made, x_RK)
        return CodesAndValues(e if keep else None, decode(made.format, e, dtype, operand, dtype), None)
    if not operand or dtype != x_RK.dtype:
        return reference.encode_with_values(made, x_RK, dtype, operand, keep, measured, random)
    found = _rows(made, x_RK, True)
    return found if keep else CodesAndValues(None, found.values, found.alpha)


def _rows(operand: Operand, x_RK: Tensor, values: bool) -> CodesAndValues:
    """Codes, and the operand if `values`, else an empty tensor."""
    asymmetric = operand.name.endswith("-asym")
    codes, scale, zero, made = native_cpu.operator("encode_int8_rows")(x_RK.contiguous(), asymmetric, values)
    e = Encoded(codes, scale, zero if asymmetric else None, None, x_RK.shape[1])
    return CodesAndValues(e, made, scale)


BACKENDS = (
    Backend("cpu", 5, _why_not_decode, decode, "decode"),
    Backend("cpu", 5, _why_not_encode, encode, "encode"),
    Backend("cpu", 5, _why_not_encode, encode_with_values, "quantize"),
)
