"""Blackwell's block-scaled tensor cores: PyTorch's NVFP4 and MX GEMMs, which torchao's NVFP4Tensor and MXTensor call.

They take our codes as they are and block scales swizzled in tiles of 128 x 4 (`formats.layout`), and accumulate in
float32. They have no outer scales. Under "aoquant" the GEMM hands over float32 accumulators, and the epilogue scales
them, adds the bias and rounds once. Without outer scales the GEMM adds the bias and rounds itself, once, which is the
same. "nvfp4_rescale" is torchao's order.

The tests run it against a double of the operator, which checks its arguments and multiplies what they stand for
(test/ops/test_blackwell.py). Never run on a Blackwell GPU: none was at hand.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from aoquant.formats import MX, NVFP4, Encoded, Format, layout

from ..call import Call
from ..router import Backend, Request
from .reference import nvfp4_epilogue, rescaled

_CONTRACTS = ("aoquant", "nvfp4_rescale")
_FLOAT4 = torch.float4_e2m1fn_x2


def _why_not(r: Request) -> str | None:
    if r.contract not in _CONTRACTS:
        return f"computes {' and '.join(_CONTRACTS)}, not {r.contract}"
    if not (_takes(r.w_format) and r.x_format is not None and _alike(r.x_format, r.w_format)):
        named = r.x_format.name if r.x_format else "high precision"
        return f"multiplies NVFP4 by NVFP4 and MX by MX, got {named} by {r.w_format.name}"
    if r.device.type != "cuda" or torch.cuda.get_device_capability(r.device)[0] < 10:
        return f"computes {r.contract} on block-scaled tensor cores, which need a Blackwell GPU (compute capability 10.0 or later)"
    if not hasattr(F, "scaled_mm"):
        return "this torch has no torch.nn.functional.scaled_mm"
    if r.k % 32 or r.n % 16:
        return f"cuBLAS multiplies blocks where K is a multiple of 32 and N of 16, got K = {r.k}, N = {r.n}"
    return None


def _alike(x: Format, w: Format) -> bool:
    """Whether one instruction multiplies their codes. NVFP4's outer scales (one for the tensor, one a row, or none) are
    left to the epilogue.
    """
    return x == w or type(x) is type(w) is NVFP4


def _takes(f: Format) -> bool:
    """Whether there is a kernel for this very class of format: a subclass is another format, and e5m2 has none."""
    return type(f) is NVFP4 or (type(f) is MX and f.element != "e5m2")


def _run(c: Call) -> Tensor:
    assert c.x is not None
    if c.contract == "nvfp4_rescale":
        return nvfp4_epilogue(c, _multiply(c.w_format, c.x, c.w, None, c.dtype))
    if c.alpha_x is None and c.alpha_w is None and (c.bias is None or c.bias.dtype == c.dtype != torch.float32):
        return c.shaped(_multiply(c.w_format, c.x, c.w, c.bias, c.dtype))
    acc_MN = _multiply(c.w_format, c.x, c.w, None, torch.float32)  # which takes no bias
    return c.shaped(rescaled(acc_MN, c.alpha_x, c.alpha_w, c.bias, c.dtype))


def _multiply(format: Format, x: Encoded, w: Encoded, bias: Tensor | None, out: torch.dtype) -> Tensor:
    """(M, N) in `out`: products of codes and block scales, summed in float32, plus bias, rounded once. torchao's own
    calls.
    """
    (a_MK, scale_a), (b_NK, scale_b) = _operand(x), _operand(w)
    if isinstance(format, NVFP4) or a_MK.dtype != _FLOAT4:
        return torch._scaled_mm(a_MK, b_NK.t(), scale_a, scale_b, bias=bias, out_dtype=out)
    blocks, swizzle = F.ScalingType.BlockWise1x32, F.SwizzleType.SWIZZLE_32_4_4
    y_MN: Tensor = F.scaled_mm(
        a_MK, b_NK.t(), scale_a, blocks, scale_b, blocks, swizzle, swizzle, bias=bias, output_dtype=out
    )
    return y_MN


def _operand(e: Encoded) -> tuple[Tensor, Tensor]:
    """Codes, two to a byte where they are e2m1, and swizzled block scales."""
    assert e.scale is not None
    codes = e.codes.view(_FLOAT4) if e.codes.dtype == torch.uint8 else e.codes
    return codes, layout.swizzle_128x4(e.scale)


BACKENDS = (Backend("torch.scaled_mm.blocks", 10, _why_not, _run, reads_codes=True),)
