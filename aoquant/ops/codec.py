"""The codec: four roles beside the GEMM, for which backends compete in the router.

    encode    x -> codes and scales
    decode    codes and scales -> the operand, or the values, of a GEMM
    quantize  x -> the operand or the values, and the codes too if somebody will read them: both roles, one pass over x
    transform x -> what a transformed format rounds of it, or a gradient back
    rotate    x -> x after a random rotation
    saturate  x -> which of its values are clipped, a bit each

The reference is `Format` itself, some rows at a time on a CPU (`tiles.py`). A forced backend rules the roles that it has; the others choose freely.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from aoquant.formats import (
    FLOAT_DTYPES,
    MX,
    NVFP4,
    Affine,
    Encoded,
    Float8,
    Float8Mslk,
    Format,
    FourOverSix,
    GridFlip,
    HighPrecision,
    Int4,
    MXFP4Dialect,
    NVFP4Dialect,
    NVFP4Search,
    Random,
    Randomized,
    Rotated,
    Transformed,
    layout,
)
from aoquant.formats.rotated import rotate
from aoquant.formats.stochastic import MSEden, MXStochastic, NVFP4Stochastic
from aoquant.transforms import Hadamard

from . import grids, tiles
from .router import Backend, Quantized, register, routed

LONGEST_ROW = 16384  # values of an integer row that the Triton kernel holds in registers


@dataclass(frozen=True)
class CodecRequest:
    """What a codec is asked for: role "encode", "decode" or "quantize" of a (rows, k) matrix; dtype: of the input of the first
    and the last, of the result of the second.
    """

    role: str
    format: Format
    device: torch.device
    dtype: torch.dtype
    rows: int
    k: int
    codes: bool = True

    def __str__(self) -> str:
        return f"{self.role} ({self.format.name}, {self.rows} x {self.k}, {self.dtype}, {self.device.type})"


def encode(format: Format, x_RK: Tensor) -> Encoded:
    """`format.encode(x_RK)`, on the fastest backend."""
    rows, k = x_RK.shape
    return routed(CodecRequest, "encode", format, x_RK.device, x_RK.dtype, rows, k).run(format, x_RK)


def decode(
    format: Format, e: Encoded, dtype: torch.dtype, *, operand: bool = False, out: torch.dtype | None = None
) -> Tensor:
    """`format.decode(e, dtype)`, or `format.operand`, then cast to `out`."""
    format = format.base
    found = routed(CodecRequest, "decode", format, e.codes.device, dtype, e.codes.shape[0], e.k)
    return found.run(format, e, dtype, operand, out or dtype)


def quantize(
    format: Format,
    x_RK: Tensor,
    dtype: torch.dtype,
    *,
    operand: bool = False,
    keep: bool = False,
    measured: Tensor | None = None,
    random: Random | None = None,
) -> Quantized:
    """`format.encode(x_RK)` if `keep`, and what it stands for in `dtype`: decoded values, or an operand and its alpha.

    measured: alpha of an earlier call for these very values, from which a backend need not look for a scale of the whole again.
    random: where the format draws from, if it does.
    """
    if isinstance(format, Rotated) and not isinstance(format.inner, Randomized):
        assert random is not None
        turns = routed(CodecRequest, "rotate", format, x_RK.device, x_RK.dtype, *x_RK.shape)
        x_RK, random = turns.run(format, x_RK, random), None
        format = format.inner
    rows, k = x_RK.shape
    found = routed(CodecRequest, "quantize", format, x_RK.device, x_RK.dtype, rows, k, keep)
    return found.run(format, x_RK, dtype, operand, keep, measured, *(() if random is None else (random,)))


def transform(
    format: Transformed, x_RK: Tensor, matrix: Tensor | None, *, back: bool = False, clipped: Tensor | None = None
) -> Tensor:
    """`format.transformed(x_RK, matrix)`, or back: `format.pull_back(masked(x_RK, clipped), matrix)`."""
    rows, k = x_RK.shape
    found = routed(CodecRequest, "transform", format, x_RK.device, x_RK.dtype, rows, k)
    return found.run(format, x_RK, matrix, back, clipped)


def _reference_transform(
    format: Transformed, x_RK: Tensor, matrix: Tensor | None, back: bool, clipped: Tensor | None
) -> Tensor:
    if not back:
        return format.transformed(x_RK, matrix)
    return format.pull_back(x_RK if clipped is None else masked(x_RK, clipped), matrix)


def saturated(format: Format, x_RK: Tensor, matrix: Tensor | None = None) -> Tensor:
    """(R, ceil(K / 8)) uint8: bits of the values that the format clips when it encodes x_RK; matrix: of a fitted transform."""
    rows, k = x_RK.shape
    return routed(CodecRequest, "saturate", format, x_RK.device, x_RK.dtype, rows, k).run(format, x_RK, matrix)


def _reference_saturated(format: Format, x_RK: Tensor, matrix: Tensor | None) -> Tensor:
    y_RK = transform(format, x_RK, matrix) if isinstance(format, Transformed) else x_RK
    return layout.pack(format.base.saturated(y_RK, encode(format.base, y_RK)).to(torch.uint8), 1)


def masked(grad_RK: Tensor, clipped: Tensor) -> Tensor:
    """Zero the gradient of clipped values, which `saturated` names."""
    return grad_RK.masked_fill(layout.unpack(clipped, 1, grad_RK.shape[1]).bool(), 0)


def _reference_decode(format: Format, e: Encoded, dtype: torch.dtype, operand: bool, out: torch.dtype) -> Tensor:
    return tiles.operand(format, e, dtype, out) if operand else tiles.decode(format, e, dtype).to(out)


def _reference_quantize(
    format: Format,
    x_RK: Tensor,
    dtype: torch.dtype,
    operand: bool,
    keep: bool,
    measured: Tensor | None = None,
    random: Random | None = None,
) -> Quantized:
    e = format.encode(x_RK, random=random) if isinstance(format, Randomized) else tiles.encode(format, x_RK)
    return Quantized(e if keep else None, _reference_decode(format, e, dtype, operand, dtype), format.alpha(e))


@cache
def _kernels() -> ModuleType:
    from . import triton

    return triton


@cache
def lacks_triton(device: torch.device) -> str | None:
    """Why the Triton kernels cannot run on `device`."""
    if device.type != "cuda":
        return "its kernels are for CUDA devices"
    if find_spec("triton") is None:
        return "Triton is not installed"
    if torch.cuda.get_device_capability(device) < (8, 9):
        return "its float8 conversions need compute capability 8.9 (Ada, Hopper) or later"
    return None


def has_triton(device: torch.device) -> bool:
    """Whether our Triton kernels run on `device`."""
    return lacks_triton(device) is None


def _why_not_triton(r: CodecRequest) -> str | None:
    if lacks := lacks_triton(r.device):
        return lacks
    if r.dtype not in FLOAT_DTYPES or r.rows == 0 or r.k == 0:
        return f"reads float32, bfloat16 or float16 matrices with values in them, got {r.rows} x {r.k} of {r.dtype}"
    f = r.format
    if r.role == "saturate":
        return _why_not_saturate(f)
    if isinstance(f, Transformed):
        alone = r.role == "transform" or (r.role != "decode" and isinstance(f.inner, HighPrecision))
        if alone and f.fitted:
            return f"has no kernel for {f.transform.name}"
        return None if alone else _why_not_triton(replace(r, format=f.inner, dtype=torch.float32))
    if isinstance(f, Randomized):
        return _why_not_random(f, r)
    if not _has_kernel(f, r.role):
        return f"has no kernel for {f.name}"
    # codes that a thread stores byte by byte come out wrong after fp8-tensor's conversions: in one such kernel Triton 3.6's PTX reads right, so the
    # assembler is suspected, not proved (H200, 2026-11-21); stores of 16 bytes are right
    if isinstance(f, Float8) and r.k % 16:
        return f"reads rows of float8 by 16, got K = {r.k}"
    if isinstance(f, Affine | Int4):
        return _why_not_integer(f, r)
    if isinstance(f, FourOverSix):
        return _why_not_grid(f, r)
    return None


def _why_not_cuda(r: CodecRequest) -> str | None:
    if r.device.type != "cuda":
        return "its kernels are for CUDA devices"
    if r.dtype not in FLOAT_DTYPES or r.rows == 0 or r.k == 0:
        return f"reads float32, bfloat16 or float16 matrices with values in them, got {r.rows} x {r.k} of {r.dtype}"
    if isinstance(r.format, Transformed):  # Triton transforms, csrc encodes
        return _why_not_triton(replace(r, role="transform")) or grids.why_not_encode(r.format.inner, r.device)
    return grids.why_not_encode(r.format, r.device)


def _to_cuda(format: Format, x_RK: Tensor) -> tuple[Any, Tensor]:
    """What csrc encodes: a format without its transform, and the transformed values."""
    if isinstance(format, Transformed):
        return format.inner, _kernels().transform(format, x_RK, None)
    return format, x_RK


def _has_kernel(f: Format, role: str) -> bool:
    """Whether the kernels know this format's every option; a subclass is another format, and a searched scale decodes as any."""
    if type(f) is Int4:
        return True
    if type(f) is Affine:
        return f.mapping in ("symmetric", "asymmetric") and not f.fixed and not f.stored and f.width > 1
    if type(f) is Float8:
        square = f.per != "block" or (f.cols == 128 and f.rows in (1, 128))
        return square and not f.fixed and f.low is None and f.high is None
    if type(f) is NVFP4Dialect:
        return f.tile == 1
    known = (MX, NVFP4, MXFP4Dialect, FourOverSix, GridFlip, Float8Mslk)
    return type(f) in known or (role == "decode" and type(f) is NVFP4Search)


def _why_not_grid(f: FourOverSix, r: CodecRequest) -> str | None:
    if r.role != "decode" and (f.tile > 1 or f.metric != "mse"):
        return f"encodes blocks of 16 by their squared error, not {f.name}"
    return None


def _why_not_random(f: Randomized, r: CodecRequest) -> str | None:
    inner = f.inner if isinstance(f, Rotated) else f
    known = type(inner) in (MXStochastic, NVFP4Stochastic, MSEden)
    if r.role != "rotate" and not (known and r.role == "quantize"):
        return f"has no kernel to {r.role} {f.name}"
    if r.k % f.period:
        return f"rotates and scales {f.period} values at once, got K = {r.k}"
    return None


def _why_not_saturate(f: Format) -> str | None:
    behind = not isinstance(f, Transformed) or isinstance(f.transform, Hadamard)
    return None if behind and isinstance(f.base, MXFP4Dialect) else f"has no kernel for {f.name}"


def _why_not_integer(f: Affine | Int4, r: CodecRequest) -> str | None:
    if f.bits not in (4, 8) and r.codes:
        return f"packs codes of 4 and 8 bits, not {f.bits}"
    if f.bits == 4 and (r.k % 2 or (f.block or 2) % 2):
        return f"packs pairs along K, got K = {r.k} in blocks of {f.block or r.k}"
    if r.role != "decode" and (f.block or (r.k if getattr(f, "per", "") == "row" else 0)) > LONGEST_ROW:
        return f"holds blocks of up to {LONGEST_ROW} values, got {f.block or r.k}"
    return None


register(
    Backend("reference", 0, lambda r: None, tiles.encode, "encode"),
    Backend("reference", 0, lambda r: None, _reference_decode, "decode"),
    Backend("reference", 0, lambda r: None, _reference_quantize, "quantize"),
    Backend("reference", 0, lambda r: None, _reference_transform, "transform"),
    Backend("reference", 0, lambda r: None, lambda f, x, random: rotate(x, random.signs(f.size)), "rotate"),
    Backend("triton", 10, _why_not_triton, lambda *a: _kernels().encode(*a), "encode"),
    Backend("triton", 10, _why_not_triton, lambda *a: _kernels().decode(*a), "decode"),
    Backend("triton", 10, _why_not_triton, lambda *a: _kernels().quantize(*a), "quantize"),
    Backend("triton", 10, _why_not_triton, lambda *a: _kernels().transform(*a), "transform"),
    Backend("triton", 10, _why_not_triton, lambda *a: _kernels().rotate(*a), "rotate"),
    Backend("reference", 0, lambda r: None, _reference_saturated, "saturate"),
    Backend("triton", 10, _why_not_triton, lambda *a: _kernels().saturated(*a), "saturate"),
    Backend("cuda", 20, _why_not_cuda, lambda f, x: grids.encode(*_to_cuda(f, x)), "encode"),
    Backend("cuda", 20, _why_not_cuda, lambda f, x, *a: grids.quantize(*_to_cuda(f, x), *a), "quantize"),
)
