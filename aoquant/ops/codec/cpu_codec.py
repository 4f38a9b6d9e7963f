"""int4 and int8 operands, int4 weights and int8 activations, by the kernels of `csrc/cpu/`: the codec's backend "cpu".

Decoding in plain PyTorch is a dozen passes over float32 values, encoding a row two dozen small calls; here both are one
pass and one call. The numbers are those of `formats/`, to the last bit.
"""

import torch
from torch import Tensor

from aoquant.formats import Encoded, Format, Operand, tiles

from .. import native_cpu
from ..quantized import Ask, Side
from ..router import Backend, CodecRequest
from . import reference

_DTYPES = (torch.bfloat16, torch.float32)
_ROWS = {"int8-row": False, "int8-row-asym": True}  # whether there is a zero point


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


def _why_not_quantize(r: CodecRequest) -> str | None:
    if (reason := _why_not(r)) is not None:
        return reason
    if r.held:
        return "makes its own scales"
    if not _is_int4(r.operand.format) and r.operand.name not in _ROWS:
        return f"encodes int4 and {' and '.join(_ROWS)}, not {r.operand.name}"
    return native_cpu.why_not()


def _is_int4(f: Format) -> bool:
    """With scales in the type of what is encoded, and groups of whole chunks."""
    return native_cpu.kind(f) == "int4" and f.scale_dtype(torch.float32) == torch.float32 and (f.block or 1) % 32 == 0


def decode(
    format: Format, e: Encoded, dtype: torch.dtype, *, operand: bool = False, out: torch.dtype | None = None
) -> Tensor:
    """`tiles.decode`, by a kernel."""
    out = out or dtype
    told = native_cpu.told(format, e, dtype)
    if told is None or out not in _DTYPES or not (operand or native_cpu.kind(format) != "int8"):
        return tiles.decode(format, e, dtype, operand=operand, out=out)
    narrow = out == torch.bfloat16 and dtype == torch.bfloat16
    made: Tensor = native_cpu.operator("decode")(told.codes, told.scale, told.zero, told.kind, told.group, narrow)
    return made.to(out)


def quantize(operand: Operand, x_RK: Tensor, ask: Ask) -> Side:
    """Codes, and the operand of rows in the same pass."""
    f, dtype = operand.format, ask.values
    if operand.name not in _ROWS:
        codes, scale, zero = native_cpu.operator("encode_int4")(x_RK.contiguous(), f.block)
        e = Encoded(codes, scale, zero, None, x_RK.shape[1])
        values = None if dtype is None else decode(f, e, dtype, operand=ask.operand)
        return Side(e if ask.codes else None, values)
    if dtype is not None and (not ask.operand or dtype != x_RK.dtype):
        return reference.quantize(operand, x_RK, ask)
    how = _ROWS[operand.name], dtype is not None
    codes, scale, zero, made = native_cpu.operator("encode_int8_rows")(x_RK.contiguous(), *how)
    e = Encoded(codes, scale, zero if _ROWS[operand.name] else None, None, x_RK.shape[1])
    return Side(e if ask.codes else None, None if dtype is None else made, scale)


BACKENDS = (
    Backend("cpu", 5, _why_not_decode, decode, "decode"),
    Backend("cpu", 5, _why_not_quantize, quantize, "quantize"),
)
