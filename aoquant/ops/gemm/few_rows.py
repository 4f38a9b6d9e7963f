"""GEMMs of few rows of x with a packed W, decoded on the way to the tensor core: what serving a model spends its time
on.

Two backends keep the contract "aoquant" from the packed tensor's own bytes, without a second copy of W: "cuda-decode",
kernels of `csrc/`, fp8's among them (one_call.py), and "triton-decode", for an aoquant that was installed without them.
Above CUDA_ROWS and TRITON_ROWS rows of x it is cheaper to decode W once and to leave the GEMM to `triton/matmul.py`.

Both choose how they cut K by N, K and a range of M, so within a range a row of y does not depend on how many rows there
are; between two ranges, and between backends, the order of additions differs. A prepared layer asks for the same (M, N,
K) as the converted one, so it gets the same kernel.
"""

import math

import torch
from torch import Tensor

from aoquant.formats import (
    MX,
    NVFP4,
    Encoded,
    Float8,
    Format,
    FourOverSix,
    GridFlip,
    Int4,
    MXFP4Dialect,
    NVFP4Dialect,
    NVFP4PowerOfTwo,
    NVFP4Search,
)

from .. import codec, linear_plan, native
from ..call import of_product
from ..linear_plan import CUDA_FORMATS
from ..native import aligned
from ..router import Multiply, Request

CUDA_ROWS, TRITON_ROWS = 256, 64
KINDS: dict[type[Format], str] = {
    Float8: "fp8",
    Int4: "int4",
    NVFP4: "e4m3",
    NVFP4PowerOfTwo: "e4m3",
    NVFP4Search: "e4m3",
    NVFP4Dialect: "e4m3",
    FourOverSix: "e4m3",
    MX: "e8m0",
    MXFP4Dialect: "e8m0",
    GridFlip: "gridflip",
}


def kind(f: Format) -> str | None:
    """Return how codes become operands: "int4", q * s + z; "e4m3", "e8m0", an e2m1 value times such a scale;
    "gridflip"; "fp8", the code itself, a row's scale multiplying its sums; None: otherwise.
    """
    how = KINDS.get(type(f))  # a subclass is another format
    fits = f.element == "e4m3" and f.reach == "row" if how == "fp8" else f.bits == 4
    return how if fits else None


def _why_not(r: Request) -> str | None:
    if r.contract != "aoquant":
        return f"computes aoquant, not {r.contract}"
    how = kind(r.w_format)
    if how is None:
        return f"decodes int4, FP4 and fp8-row weights, not {r.w_format.name}"
    if r.device.type != "cuda":
        return "needs a CUDA device"
    if r.dtype not in (torch.bfloat16, torch.float16):
        return f"multiplies bfloat16 or float16, got {r.dtype}"
    scales = r.w_format.scale_dtype(r.scale_dtype or r.dtype)
    if how == "int4" and scales != r.dtype:
        return f"makes int4's operands in one type, got scales in {scales} and activations in {r.dtype}"
    block = r.w_format.block or 0
    if r.k % 32 or (how != "fp8" and (block < 16 or block & (block - 1))):
        return f"needs K % 32 == 0 and blocks of 16, 32, 64, ..., got K = {r.k} and blocks of {block}"
    return None


def why_not_cuda(r: Request) -> str | None:
    return _why_not_csrc(r) or _too_many(r, CUDA_ROWS)


def decodes(r: Request) -> bool:
    """Return whether csrc makes W's values for this product, for however many rows; or multiplies a stack of such W's,
    those of experts.
    """
    return _why_not_csrc(r) is None


def _why_not_csrc(r: Request) -> str | None:
    if (reason := _why_not(r)) is not None:
        return reason
    if torch.cuda.get_device_capability(r.device) != (9, 0):
        return "its kernels are for Hopper (compute capability 9.0)"
    if (reason := native.why_not()) is not None:
        return reason
    f, how = r.w_format, kind(r.w_format)
    if how == "e8m0" and r.dtype != torch.bfloat16:
        return f"needs bfloat16 activations for e8m0 scales, which leave the range of {r.dtype}"
    if math.frexp(f.shifts[0])[0] * 16 % 1:
        return f"needs a shift of at most 4 bits, so that it is exact times a scale, got c = {f.shifts[0]}"
    if how == "int4" and (f.block or 0) < 32:
        return f"needs groups of at least 32, got {f.block}"
    return None


def plan_of(f: Format, w: Encoded, dtype: torch.dtype, encoder: str | None = None) -> int:
    """Return what csrc is told of W, for products in `dtype`. encoder: of x, a row format's name; None: x stays as it
    is.
    """
    how = KINDS[type(f)]
    even, odd = f.shifts
    has_zero, has_alpha = w.zero is not None, alpha_of(f, w) is not None
    return linear_plan.packed(how, encoder, f.block or 1, f.tile_rows, even, odd != even, has_zero, has_alpha, dtype)


def alpha_of(f: Format, w: Encoded) -> Tensor | None:
    """Return what multiplies W's sums: the scales of fp8's rows, else the outer scale."""
    return w.scale if kind(f) == "fp8" else w.outer


def _why_not_triton(r: Request) -> str | None:
    if (reason := _why_not(r)) is not None:
        return reason
    if kind(r.w_format) == "fp8":
        return f"decodes int4 and FP4 weights, not {r.w_format.name}"
    if not codec.has_triton(r.device):
        return "needs Triton and compute capability 8.9 (Ada, Hopper) or later"
    return _too_many(r, TRITON_ROWS)


def _too_many(r: Request, most: int) -> str | None:
    return None if r.m <= most else f"is for up to {most} rows: with more it is faster to decode W once"


def cuda_product(f: Format, w: Encoded, dtype: torch.dtype) -> Multiply:
    """x (M, K) -> y (M, N) with W's tensors as the kernel reads them."""
    how = KINDS[type(f)]
    multiply, constants = native.operator("decode_mm"), (CUDA_FORMATS[how], f.block or 1, f.tile_rows, *f.shifts)
    codes, scale = aligned(w.codes), aligned(w.scales)
    zero = None if w.zero is None else aligned(w.zero)

    def product(x_MK: Tensor, alpha_x: Tensor | None, bias: Tensor | None) -> Tensor:
        if bias is not None:
            bias = (bias if bias.dtype in (x_MK.dtype, torch.float32) else bias.float()).contiguous()
        # alpha_w anew: where it is not W's own outer scale, it is computed of one that may have been written since
        return multiply(aligned(x_MK), codes, scale, zero, alpha_x, f.alpha(w), bias, *constants)

    return product


def _triton_product(f: Format, w: Encoded, dtype: torch.dtype) -> Multiply:
    from ..triton import few_rows_kernels, launch

    how = KINDS[type(f)]

    def product(x_MK: Tensor, alpha_x: Tensor | None, bias: Tensor | None) -> Tensor:
        with launch.on(x_MK):
            return few_rows_kernels.decode_mm(f, how, w, x_MK, alpha_x, f.alpha(w), bias)

    return product


# copies in each call
BACKENDS = (of_product("triton-decode", 7, _why_not_triton, _triton_product, reads=lambda t: True),)
