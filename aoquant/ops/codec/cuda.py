"""Formats that try several scales for a block, encoded by `csrc/`: the codec's backend "cuda", for the roles that
encode.

Four-over-six and GridFlip take two launches, the largest finite magnitude and the encoder, or one where the format's
amax is constant; NVFP4's search takes the outer scale that the format measures. Decoding is Triton's: it is bound by
memory, and there is nothing that CUDA could do better.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aoquant.formats import FLOAT_DTYPES, Encoded, Format, FourOverSix, GridFlip, NVFP4Search, Operand, Random

from .. import native
from ..router import Backend, CodecRequest, CodesAndValues
from . import triton

_EFFORTS = {"base": 1, "sided": 2, "search": 3}  # 0: four-over-six
_METRICS = {"mse": 0, "mae": 1, "absmax": 2}
# exactly these classes: a subclass is another format
_OPERATORS: dict[type[Format], tuple[str, ...]] = {
    FourOverSix: ("encode_grids", "finite_absmax"),
    GridFlip: ("encode_grids", "finite_absmax"),
    NVFP4Search: ("encode_search",),
}
_DTYPES = {None: 0, torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}


def why_not_encode(format: Format, device: torch.device) -> str | None:
    """Why the library cannot encode `format` on `device`; None when it can."""
    if isinstance(format, FourOverSix | NVFP4Search) and format.outer == "row":
        return f"encodes under one outer scale for the tensor, not one a row: {format.name}"
    needs = _OPERATORS.get(type(format))
    if needs is None:
        return "encodes four-over-six, GridFlip and NVFP4's search alone"
    return next(filter(None, map(native.why_not, needs)), None) or native.why_not_on(device)


def _why_not(r: CodecRequest) -> str | None:
    if r.device.type != "cuda":
        return "its kernels are for CUDA devices"
    if r.dtype not in FLOAT_DTYPES or r.rows == 0 or r.k == 0:
        return f"reads float32, bfloat16 or float16 matrices with values in them, got {r.rows} x {r.k} of {r.dtype}"
    if r.operand.transform is not None and (reason := triton.why_not_transform(r)):
        return reason
    return why_not_encode(r.operand.format, r.device)


def encode(operand: Operand, x_RK: Tensor) -> Encoded:
    """`operand.encode(x_RK)`."""
    return _run(operand.format, _transformed(operand, x_RK), None, False, None)[0]


def encode_with_values(
    made: Operand,
    x_RK: Tensor,
    dtype: torch.dtype,
    operand: bool,
    keep: bool,
    measured: Tensor | None = None,
    random: Random | None = None,
) -> CodesAndValues:
    """Codes, and in the same pass what they stand for. measured: an outer scale, which gives four-over-six's amax not
    back exactly.
    """
    e, values = _run(made.format, _transformed(made, x_RK), dtype, operand, measured)
    return CodesAndValues(e if keep else None, values, e.outer)


def _transformed(operand: Operand, x_RK: Tensor) -> Tensor:
    """Triton transforms, csrc encodes."""
    return x_RK if operand.transform is None else triton.transform(operand, x_RK, None)


def _run(
    format: Format, x_RK: Tensor, dtype: torch.dtype | None, operand: bool, measured: Tensor | None
) -> tuple[Encoded, Tensor]:
    x = x_RK.contiguous()
    if x.data_ptr() % 16:  # a slice of something contiguous
        x = x.clone()
    if isinstance(format, NVFP4Search):
        outer = format.measure(x).outer if measured is None else measured
        given = x.new_empty(0, dtype=torch.float32) if outer is None else outer
        codes, scale, values = native.operator("encode_search")(x, given, _DTYPES[dtype], operand)
        return Encoded(codes, scale.view(torch.float8_e4m3fn), None, outer, x.shape[1]), values
    assert isinstance(format, FourOverSix)
    flips = format if isinstance(format, GridFlip) else None
    known = format.fixed[0] if format.fixed else 0.0
    amax = x.new_empty(0, dtype=torch.int32) if known else native.operator("finite_absmax")(x)
    codes, scale, outer, values = native.operator("encode_grids")(
        x, amax, known, _EFFORTS[flips.effort] if flips else 0, _METRICS[format.metric], format.tile,
        flips.c if flips else 0.25, bool(flips and flips.alternating), _DTYPES[dtype], operand,
    )  # fmt: skip
    return Encoded(codes, scale.view(torch.float8_e4m3fn), None, outer, x.shape[1]), values


BACKENDS = (
    Backend("cuda", 20, _why_not, encode, "encode"),
    Backend("cuda", 20, _why_not, encode_with_values, "quantize"),
)
