"""Fitted transforms (WUSH) by `csrc/fitted.cu`: the codec's backend "cuda-fitted" for the role "transform", and what
"cuda" quantizes behind one.

The definition sums a block's products in float64, and so do Hopper's tensor cores: the matrices fit the chip, and x is
read at nearly the speed of memory. NVFP4 and MXFP4 are encoded in the same pass; NVFP4's outer scale of the tensor
takes one more, which transforms x and keeps its largest magnitude alone: cheaper than float32 values in memory between
the two. Other formats encode what the transform wrote.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from aoquant.formats import FLOAT_DTYPES, MX, NVFP4, Encoded, Format, Operand
from aoquant.transforms import WUSH
from aoquant.transforms.wush import NEEDS_MATRIX

from .. import native
from ..quantized import Ask, Side
from ..router import Backend, CodecRequest
from .reference import masked

FIND = -1.0  # an outer scale that is not known
# exactly these classes: a subclass is another format
_HAS: dict[type[Format], Callable[[Format], bool]] = {
    NVFP4: lambda f: f.reach != "row",
    MX: lambda f: f.name == "mxfp4",
}


def _why_not_transform(r: CodecRequest) -> str | None:
    transform = r.operand.transform
    if not isinstance(transform, WUSH):
        return "transforms by fitted matrices alone"
    if r.device.type != "cuda":
        return "its kernels are for CUDA devices"
    if r.dtype not in FLOAT_DTYPES or r.rows == 0 or r.k == 0:
        return f"reads float32, bfloat16 or float16 matrices with values in them, got {r.rows} x {r.k} of {r.dtype}"
    if torch.cuda.get_device_capability(r.device)[0] not in (9, 10):
        return "sums in float64 on tensor cores, which only Hopper and the large Blackwells have at speed"
    return native.why_not() or native.why_not_on(r.device)


def why_not(r: CodecRequest) -> str | None:
    """Return why codes behind a fitted transform are not made in one pass; None when they are."""
    f = r.operand.format
    if r.values:
        return "makes codes alone"
    has = _HAS.get(type(f))
    if has is None or not has(f):
        return f"encodes NVFP4 and MXFP4 behind a fitted transform, not {f.name}"
    return _why_not_transform(r)


def _given(operand: Operand, x_RK: Tensor, matrix: Tensor | None) -> tuple[Tensor, Tensor]:
    if matrix is None:
        assert operand.transform is not None
        raise ValueError(NEEDS_MATRIX.format(operand.transform.name))
    return native.aligned(x_RK), matrix.float().contiguous()


def transform(operand: Operand, x_RK: Tensor, matrix: Tensor | None, back: bool, clipped: Tensor | None) -> Tensor:
    """`operand.transformed(x_RK, matrix)`, or back: `operand.pull_back(x_RK, matrix)`, zero where it is clipped."""
    dtype = x_RK.dtype if back or operand.format.lossless else torch.float32
    if clipped is not None:
        x_RK = masked(x_RK, clipped)
    x, given = _given(operand, x_RK, matrix)
    return native.operator("transform_fitted")(x, given, back, native.OUT[dtype])


def quantize(operand: Operand, x_RK: Tensor, ask: Ask) -> Side:
    """Codes and scales of the transformed x_RK."""
    f = operand.format
    x, given = _given(operand, x_RK, None if ask.held is None else ask.held.transform)
    known = f.fixed[0] if f.fixed else FIND if f.per_tensor else 0.0
    assert f.block_scale is not None
    codes, scale, outer = native.operator("encode_fitted")(x, given, f.block, known)
    return Side(Encoded(codes, scale.view(f.block_scale), None, outer if known else None, x.shape[1]))


BACKENDS = (Backend("cuda-fitted", 20, _why_not_transform, transform, "transform"),)
