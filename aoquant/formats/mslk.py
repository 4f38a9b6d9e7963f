"""fp8 rows in MSLK's dialect: torchao's under `kernel_preference` MSLK, and in every int4 layer with fp8 activations.

    s = max(absmax, 1/512) / 448;  q = e4m3(clamp(x / s, -448, 448));  value = q * s

All is computed in float32, and both divisions are correctly rounded.

Two things set it apart from PyTorch's dialect (float8.py): the floor of 1/512 under a row's absmax, so that a row of
zeros has a scale and is zeros, not NaN, and the divisions, which are real ones on every device, never a multiplication
by a reciprocal.

The GEMM that takes these rows, `f8f8bf16_rowwise`, was read with one-hot rows, whose sums no order can change: acc by
e4m3 wgmma, then rn_bf16(w_scale * (x_scale * acc)), each product rounded to float32; a bfloat16 bias is added to that
and rounded again, a float32 bias is fused, rn_bf16(fma(w_scale, x_scale * acc, bias)). No other order of the scales
gives its bytes.

Source: MSLK 1.1 `quantize_fp8_row`, its Triton kernel, on an H200; the fallback that the same package takes on a CPU
multiplies by 448 / absmax instead, and releases before 1.1 did too: neither is a reference.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Encoded, Scales
from .elements import ELEMENTS, to_float8
from .float8 import Float8
from .scales import absmax

ROW_FLOOR = 1.0 / 512


def row_scales(x_RK: Tensor) -> Tensor:
    """float32 scales (R, 1)."""
    amax = absmax(x_RK.contiguous()).unsqueeze(-1).float().clamp(min=ROW_FLOOR)
    return amax / torch.full_like(
        amax, ELEMENTS["e4m3"].largest
    )  # by a tensor: CUDA multiplies by a number's reciprocal


def row_codes(x_RK: Tensor, scale: Tensor) -> Tensor:
    """e4m3 codes (R, K) of x under `scale` (R, 1)."""
    return to_float8(x_RK.contiguous().float() / scale, "e4m3")


@dataclass(frozen=True)
class Float8Mslk(Float8):
    """e4m3 with a float32 scale per row, made as MSLK's `quantize_fp8_row` makes it."""

    name = "fp8-row-mslk"
    row_floor = ROW_FLOOR

    def measure(self, x_RK: Tensor) -> Scales:
        return Scales(row_scales(x_RK))

    def quantize(self, x_RK: Tensor, s: Scales) -> Encoded:
        return Encoded(row_codes(x_RK, s.scales), s.scales, None, None, x_RK.shape[1])

    def floored(self, e: Encoded) -> Tensor:
        small = e.scales <= ROW_FLOOR / ELEMENTS["e4m3"].largest
        return small & (e.codes.float() != 0).any(-1, keepdim=True)
