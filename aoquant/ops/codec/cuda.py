"""Formats that try several scales for a block, and operands whose rows are encoded one by one, by `csrc/`: the
codec's backend "cuda", for the roles that encode.

Four-over-six and GridFlip take two launches, the largest finite magnitude and the encoder, or one where the format's
amax is constant; NVFP4's search takes three, since its outer scale is NaN where x has one. Decoding is Triton's: it is
bound by memory, and there is nothing that CUDA could do better.

Formats with one scale for a whole tensor are `whole.py`'s. "nvfp4-row", "fp8-row", "mxfp4" and "fouroversix-row" become
operands in one launch, which costs the host less than Triton's.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from aoquant.formats import FLOAT_DTYPES, Encoded, Format, FourOverSix, GridFlip, NVFP4Search, Operand
from aoquant.formats.blockscaled import PTS_FLOOR
from aoquant.formats.scales import reciprocal

from .. import native
from ..linear_plan import ROW_FORMATS
from ..quantized import Ask, Side
from ..router import Backend, CodecRequest
from . import fitted, triton, whole

_EFFORTS = {"": 0, "base": 1, "sided": 2, "search": 3}
_METRICS = {"mse": 0, "mae": 1, "absmax": 2}
VALUES = 1 << 24  # of ROW_FORMATS; measured for nvfp4-row and fp8-row


def why_not_encode(format: Format, device: torch.device) -> str | None:
    """Return why the library cannot encode `format` on `device`; None when it can."""
    if type(format) not in _ENCODERS:
        return "encodes four-over-six, GridFlip and NVFP4's search alone"
    if format.reach == "row":
        return f"encodes under one outer scale for the tensor, not one a row: {format.name}"
    return native.why_not() or native.why_not_on(device)


def _why_not(r: CodecRequest) -> str | None:
    if r.device.type != "cuda":
        return "its kernels are for CUDA devices"
    if r.held:
        return "makes its own scales"
    if r.operand.fitted:
        return fitted.why_not(r)
    if r.dtype not in FLOAT_DTYPES or r.rows == 0 or r.k == 0:
        return f"reads float32, bfloat16 or float16 matrices with values in them, got {r.rows} x {r.k} of {r.dtype}"
    if whole.has(r.operand):
        return whole.why_not(r)
    if r.operand.transform is not None and (reason := triton.why_not_transform(r)):
        return reason
    if r.operand.name in ROW_FORMATS:
        return _why_not_rows(r)
    return why_not_encode(r.operand.format, r.device)


def _why_not_rows(r: CodecRequest) -> str | None:
    """Of one of ROW_FORMATS: why it is not encoded here."""
    if r.operand.transform is not None or r.codes:
        return f"makes the operand of {r.operand.format.name}, without a transform, and not codes"
    if r.rows * r.k > VALUES:
        return f"encodes up to {VALUES} values of {r.operand.name}: with more Triton's kernel is faster"
    values = r.operand.format.block or 16
    if r.dtype not in (torch.bfloat16, torch.float16) or r.k % values:
        return f"reads rows of bfloat16 or float16 by {values}, got K = {r.k} of {r.dtype}"
    return native.why_not() or native.why_not_on(r.device)


def quantize(operand: Operand, x_RK: Tensor, ask: Ask) -> Side:
    """Codes, and in the same pass what they stand for. A measured outer scale gives four-over-six's amax not back
    exactly.
    """
    if operand.fitted:
        return fitted.quantize(operand, x_RK, ask)
    if whole.has(operand):
        if ask.measured is not None:
            return triton.quantize(operand, x_RK, ask)
        return whole.encode(operand.format, native.aligned(x_RK), ask.values, ask.operand, ask.codes)
    if (number := ROW_FORMATS.get(operand.name)) is not None:
        if ask.values is not x_RK.dtype:  # a weight of few rows, multiplied in another type than its own
            return triton.quantize(operand, x_RK, ask)
        values, alpha = native.operator("encode_rows")(native.aligned(x_RK), number, not ask.operand)
        return Side(None, values, None if operand.reach == "block" else alpha)  # without codes
    if operand.transform is not None:  # Triton transforms, csrc encodes
        x_RK = triton.transform(operand, x_RK, None)
    made = _ENCODERS[type(operand.format)](operand.format, native.aligned(x_RK), ask)
    return made if ask.codes else made._replace(encoded=None)


def _search(format: NVFP4Search, x: Tensor, ask: Ask) -> Side:
    """Make codes, and values, or an empty tensor where none are asked for."""
    outer = _outer(format, x) if ask.measured is None else ask.measured
    given = x.new_empty(0, dtype=torch.float32) if outer is None else outer
    codes, scale, values = native.operator("encode_search")(x, given, native.OUT[ask.values], ask.operand)
    e = Encoded(codes, scale.view(torch.float8_e4m3fn), None, outer, x.shape[1])
    return Side(e, values, outer)


def _grids(format: FourOverSix, x: Tensor, ask: Ask) -> Side:
    """Make codes, and values, or an empty tensor where none are asked for."""
    even, odd = format.shifts
    known = format.fixed[0] if format.fixed else 0.0
    amax = x.new_empty(0, dtype=torch.int32) if known else native.operator("finite_absmax")(x)
    codes, scale, outer, values = native.operator("encode_grids")(
        x, amax, known, _EFFORTS[format.effort], _METRICS[format.metric], format.tile,
        even or 0.25, odd != even, native.OUT[ask.values], ask.operand,
    )  # fmt: skip
    e = Encoded(codes, scale.view(torch.float8_e4m3fn), None, outer, x.shape[1])
    return Side(e, values, outer)


def _outer(format: NVFP4Search, x: Tensor) -> Tensor | None:
    """`format.measure(x).outer`."""
    if format.outer != "dynamic":
        return format.measure(x).outer
    return native.operator("outer_scale")(x, reciprocal(format.top), PTS_FLOOR)


# exactly these classes: a subclass is another format
_ENCODERS: dict[type[Format], Callable[..., Side]] = {FourOverSix: _grids, GridFlip: _grids, NVFP4Search: _search}


BACKENDS = (Backend("cuda", 20, _why_not, quantize, "quantize"),)
