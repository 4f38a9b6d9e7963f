"""Formats that try several scales for a block, encoded by `csrc/`: the codec's backend "cuda", for the roles that encode.

Four-over-six and GridFlip take two launches, the largest finite magnitude and the encoder, or one where the format's amax is constant;
NVFP4's search takes the outer scale that the format measures. Decoding is Triton's: it is bound by memory, and there is nothing that CUDA
could do better.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aoquant.formats import Encoded, Format, FourOverSix, GridFlip, NVFP4Search

from . import native
from .router import Quantized

_EFFORTS = {"base": 1, "sided": 2, "search": 3}  # 0: four-over-six
_METRICS = {"mse": 0, "mae": 1, "absmax": 2}
_DTYPES = {None: 0, torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}


def why_not_encode(format: Format, device: torch.device) -> str | None:
    """Why the library cannot encode `format` on `device`; None when it can."""
    if isinstance(format, FourOverSix | NVFP4Search) and format.outer == "row":
        return f"encodes under one outer scale for the tensor, not one a row: {format.name}"
    if type(format) is NVFP4Search:
        return native.why_not("encode_search") or native.why_not_on(device)
    if type(format) not in (FourOverSix, GridFlip):
        return "encodes four-over-six, GridFlip and NVFP4's search alone"
    return native.why_not("encode_grids") or native.why_not("finite_absmax") or native.why_not_on(device)


def encode(format: FourOverSix | NVFP4Search, x_RK: Tensor) -> Encoded:
    """`format.encode(x_RK)`."""
    return _run(format, x_RK, None, False, None)[0]


def quantize(
    format: FourOverSix | NVFP4Search,
    x_RK: Tensor,
    dtype: torch.dtype,
    operand: bool,
    keep: bool,
    measured: Tensor | None = None,
) -> Quantized:
    """Codes, and in the same pass what they stand for. measured: an outer scale, which gives four-over-six's amax not back exactly."""
    e, values = _run(format, x_RK, dtype, operand, measured)
    return Quantized(e if keep else None, values, e.outer)


def _run(
    format: FourOverSix | NVFP4Search, x_RK: Tensor, dtype: torch.dtype | None, operand: bool, measured: Tensor | None
) -> tuple[Encoded, Tensor]:
    x = x_RK.contiguous()
    if x.data_ptr() % 16:  # a slice of something contiguous
        x = x.clone()
    if isinstance(format, NVFP4Search):
        outer = format.measure(x).outer if measured is None else measured
        given = x.new_empty(0, dtype=torch.float32) if outer is None else outer
        codes, scale, values = native.operator("encode_search")(x, given, _DTYPES[dtype], operand)
        return Encoded(codes, scale.view(torch.float8_e4m3fn), None, outer, x.shape[1]), values
    flips = format if isinstance(format, GridFlip) else None
    known = format.fixed[0] if format.fixed else 0.0
    amax = x.new_empty(0, dtype=torch.int32) if known else native.operator("finite_absmax")(x)
    codes, scale, outer, values = native.operator("encode_grids")(
        x, amax, known, _EFFORTS[flips.effort] if flips else 0, _METRICS[format.metric], format.tile,
        flips.c if flips else 0.25, bool(flips and flips.alternating), _DTYPES[dtype], operand,
    )  # fmt: skip
    return Encoded(codes, scale.view(torch.float8_e4m3fn), None, outer, x.shape[1]), values
