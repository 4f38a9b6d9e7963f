"""torchao and MSLK's own conversion of a matrix, laid out as aoquant's `Encoded`: the oracle of exact and golden tests.

Two things are done to torchao and no more. `cuda_division` makes `tensor / python number` on the CPU what it is in
PyTorch's CUDA kernels, a multiplication by the float32 reciprocal, so that a CPU test can state what a GPU converts to.
NVFP4's outer scale may be passed in, since torchao leaves the choice to its caller.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torchao
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from aoquant.formats import MX, NVFP4, Affine, Encoded, Float8, Format, Int4

ROOT = Path(torchao.__file__).parent
# each config that torchao's source registers a handler for, and its module
HANDLED = {
    name: ".".join(("torchao", *path.relative_to(ROOT).with_suffix("").parts))
    for path in sorted(ROOT.rglob("*.py"))
    for name in re.findall(r"^@register_quantize_module_handler\((\w+)\)", path.read_text(encoding="utf-8"), re.M)
}
del HANDLED["QATConfig"]  # not a base: what wraps one


class Theirs(NamedTuple):
    """What torchao stores: integer codes unpacked, everything else as in `Encoded`."""

    codes: Tensor
    scale: Tensor
    zero: Tensor | None = None
    outer: Tensor | None = None


class Refused(Exception):
    """torchao does not take this dtype, or a package is missing."""


class cuda_division(TorchDispatchMode):
    """`tensor / number` as CUDA computes it: times the float32 reciprocal, in float32, rounded to tensor's dtype."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.div.Tensor and isinstance(args[1], int | float):
            return (args[0].float() * reciprocal(args[1])).to(args[0].dtype)
        return func(*args, **(kwargs or {}))


def reciprocal(c: float) -> float:
    """1 / c rounded to float32."""
    return float(struct.unpack("f", struct.pack("f", 1.0 / c))[0])


def torchao_encode(fmt: Format, x: Tensor, outer: Tensor | None = None) -> Theirs:
    """torchao's conversion of x to what fmt says, on x's device. Raises Refused where torchao has none."""
    t: Any = torchao_tensor(fmt, x, outer)
    if isinstance(fmt, Int4):
        return Theirs(t.qdata.view(torch.uint8), t.scale.t(), t.zero_point.t())
    if isinstance(fmt, Affine):
        return Theirs(t.qdata, t.scale, t.zero_point if fmt.mapping == "asymmetric" else None)
    outer = t.per_tensor_scale if isinstance(fmt, NVFP4) else None
    return Theirs(t.qdata, t.scale, None, None if outer is None else outer.reshape(1, 1))


def torchao_tensor(fmt: Format, x: Tensor, outer: Tensor | None = None) -> Tensor:
    """The tensor subclass that torchao converts x to."""
    x = x.contiguous()
    if isinstance(fmt, Int4):
        return _int4(fmt, x)
    if isinstance(fmt, Affine):
        return _affine(fmt, x)
    if isinstance(fmt, Float8):
        return _float8(fmt, x)
    if x.dtype == torch.float16:
        raise Refused("torchao takes bfloat16 and float32 alone")
    if isinstance(fmt, MX):
        return _mx(fmt, x)
    if not isinstance(fmt, NVFP4):
        raise Refused(f"torchao has no {fmt.name}")
    return _nvfp4(fmt, x, outer)


def _int4(fmt: Int4, x: Tensor) -> Tensor:
    from torchao.quantization.quantize_.workflows import Int4Tensor

    try:
        return Int4Tensor.from_hp(x, [1, fmt.group])
    except ImportError as e:
        raise Refused(str(e)) from e


def _affine(fmt: Affine, x: Tensor) -> Tensor:
    from torchao.quantization import MappingType, PerGroup, PerRow, PerTensor
    from torchao.quantization.quant_api import _adjust_scale_dtype_in_intx_unpacked_tensor
    from torchao.quantization.quantize_.workflows import IntxUnpackedToInt8Tensor
    from torchao.quantization.quantize_.workflows.int8.int8_tensor import Int8Tensor

    mapping = {
        "symmetric": MappingType.SYMMETRIC,
        "asymmetric": MappingType.ASYMMETRIC,
        "noclip": MappingType.SYMMETRIC_NO_CLIPPING_ERR,
    }[fmt.mapping]
    if fmt.scales == "float32":
        granularity = {"row": PerRow(), "tensor": PerTensor(), "group": PerGroup(fmt.group or 1)}[fmt.per]
        return Int8Tensor.from_hp(x, granularity, mapping, reduce_range=fmt.width == 7)
    block = {"row": (1, x.shape[1]), "tensor": tuple(x.shape), "group": (1, fmt.group)}[fmt.per]
    dtype = getattr(torch, f"int{fmt.width}")
    t = IntxUnpackedToInt8Tensor.from_hp(x, block, dtype, mapping_type=mapping)
    if fmt.stored:
        _adjust_scale_dtype_in_intx_unpacked_tensor(t, x, getattr(torch, fmt.stored))
    return t


def _float8(fmt: Float8, x: Tensor) -> Tensor:
    from torchao.quantization import Float8Tensor, PerBlock, PerRow, PerTensor
    from torchao.quantization.quantize_.common import KernelPreference

    if x.shape[0] % fmt.rows:
        raise Refused("torchao takes whole tiles alone")
    return Float8Tensor.from_hp(
        x,
        {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[fmt.element],
        {"row": PerRow(), "tensor": PerTensor(), "block": PerBlock([fmt.rows, fmt.cols])}[fmt.per],
        hp_value_lb=fmt.low,
        hp_value_ub=fmt.high,
        kernel_preference=KernelPreference.TORCH,
    )


def _mx(fmt: MX, x: Tensor) -> Tensor:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    element = {"e2m1": torch.float4_e2m1fn_x2, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[fmt.element]
    return MXTensor.to_mx(x, element, 32, ScaleCalculationMode(fmt.rule))


def _nvfp4(fmt: NVFP4, x: Tensor, outer: Tensor | None) -> Tensor:
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    if fmt.outer == "static":
        outer = torch.tensor(fmt.pts, dtype=torch.float32, device=x.device)
    elif fmt.outer == "dynamic":
        outer = per_tensor_amax_to_scale(x.abs().max()) if outer is None else outer.reshape(())
    return NVFP4Tensor.to_nvfp4(x, per_tensor_scale=outer)


def ours(fmt: Format, e: Encoded) -> Theirs:
    """Our own encoding in the same shape as torchao's."""
    assert e.scale is not None
    return Theirs(fmt.integers(e) if isinstance(fmt, Affine) else e.codes, e.scale, e.zero, e.outer)


def same(a: Tensor, b: Tensor) -> Tensor:
    """Element by element, equal bytes, or both NaN. Shapes and dtypes have to agree."""
    assert a.shape == b.shape, f"shapes {tuple(a.shape)} and {tuple(b.shape)}"
    assert a.dtype == b.dtype, f"dtypes {a.dtype} and {b.dtype}"
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    equal = a.contiguous().view(integer) == b.contiguous().view(integer)
    return equal | (a.float().isnan() & b.float().isnan()) if a.is_floating_point() else equal


def differing(fmt: Format, mine: Theirs, theirs: Theirs) -> dict[str, int]:
    """Field -> how many elements differ; only fields where any do.

    One difference is meant: where a float8 scale is 0, torchao divides by it and stores NaN or the largest code; we, 0.
    """
    found: dict[str, int] = {}
    for field, a, b in zip(Theirs._fields, mine, theirs, strict=True):
        if a is None or b is None:
            assert a is b, f"{fmt.name}: only one side has a {field}"
            continue
        if field == "codes" and isinstance(fmt, Float8):
            zero = theirs.scale == 0
            if fmt.per == "block":
                zero = zero.repeat_interleave(fmt.rows, 0).repeat_interleave(fmt.cols, 1)
            b = torch.where(zero, torch.zeros_like(b), b)
        count = int((~same(a.cpu(), b.cpu())).sum())
        if count:
            found[field] = count
    return found
