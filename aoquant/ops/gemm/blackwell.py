"""Blackwell's block-scaled tensor cores: PyTorch's NVFP4 and MX GEMMs, which torchao's NVFP4Tensor and MXTensor call.

They take our codes as they are and block scales swizzled in tiles of 128 x 4 (`formats.layout`), and accumulate in
float32. They have no outer scales. Under "aoquant" the GEMM hands over float32 accumulators, and the epilogue scales
them, adds the bias and rounds once. Without outer scales the GEMM adds the bias and rounds itself, once, which is the
same. "nvfp4_rescale" is torchao's order.

The tests run it against a double of the operator, which checks its arguments and multiplies what they stand for
(test/ops/test_blackwell.py). Never run on a Blackwell GPU: none was at hand.
"""

from collections.abc import Callable

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
    if r.x_format is None or _instruction(r.w_format) is None or _instruction(r.x_format) != _instruction(r.w_format):
        named = r.x_format.name if r.x_format else "high precision"
        return f"multiplies NVFP4 by NVFP4 and MX by MX, got {named} by {r.w_format.name}"
    if r.device.type != "cuda" or torch.cuda.get_device_capability(r.device)[0] < 10:
        return f"computes {r.contract} on block-scaled tensor cores, which need a Blackwell GPU (compute capability 10.0 or later)"
    if not hasattr(F, "scaled_mm"):
        return "this torch has no torch.nn.functional.scaled_mm"
    if r.k % 32 or r.n % 16:
        return f"cuBLAS multiplies blocks where K is a multiple of 32 and N of 16, got K = {r.k}, N = {r.n}"
    return None


# exactly these classes: a subclass is another format. e5m2 has no kernel; NVFP4's outer scales (one for the tensor, one
# for each row, or none) are left to the epilogue
_INSTRUCTIONS: dict[type[Format], Callable[[Format], str | None]] = {
    NVFP4: lambda f: "nvfp4",
    MX: lambda f: None if f.element == "e5m2" else f.name,
}


def _instruction(f: Format) -> str | None:
    """The instruction that multiplies codes of f by its like; None when there is none."""
    named = _INSTRUCTIONS.get(type(f))
    return named(f) if named else None


def _run(c: Call) -> Tensor:
    if c.contract == "nvfp4_rescale":
        return nvfp4_epilogue(c, _multiply(c.w_format, c.x, c.w, None, c.dtype))
    if c.alpha_x is None and c.alpha_w is None and (c.bias is None or c.bias.dtype == c.dtype != torch.float32):
        return c.shaped(_multiply(c.w_format, c.x, c.w, c.bias, c.dtype))
    acc_MN = _multiply(c.w_format, c.x, c.w, None, torch.float32)  # which takes no bias
    return c.shaped(rescaled(acc_MN, c.alpha_x, c.alpha_w, c.bias, c.dtype))


def _multiply(format: Format, x: Encoded, w: Encoded, bias: Tensor | None, out: torch.dtype) -> Tensor:
    """(M, N) in `out`: block products summed in float32, plus bias, rounded once, by torchao's own calls."""
    (a_MK, scale_a), (b_NK, scale_b) = _operand(x), _operand(w)
    if format.block == 16 or a_MK.dtype != _FLOAT4:
        return torch._scaled_mm(a_MK, b_NK.t(), scale_a, scale_b, bias=bias, out_dtype=out)
    blocks, swizzle = F.ScalingType.BlockWise1x32, F.SwizzleType.SWIZZLE_32_4_4
    return F.scaled_mm(a_MK, b_NK.t(), scale_a, blocks, scale_b, blocks, swizzle, swizzle, bias=bias, output_dtype=out)


def _operand(e: Encoded) -> tuple[Tensor, Tensor]:
    """Codes, two to a byte where they are e2m1, and swizzled block scales."""
    codes = e.codes.view(_FLOAT4) if e.codes.dtype == torch.uint8 else e.codes
    return codes, layout.swizzle_128x4(e.scales)


BACKENDS = (Backend("torch.scaled_mm.blocks", 10, _why_not, _run, reads_codes=True),)
