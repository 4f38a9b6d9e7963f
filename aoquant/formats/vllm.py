"""vLLM's numerics where they differ from torchao's: activation quantisers, and outer scales that fused layers share.

    fp8-row-vllm             s = max(amax / 448, 1 / (448 * 512));  q = e4m3(x / s): its CUDA kernel. The numbers
                             are MSLK's (mslk.py), so this is another name of fp8-row-mslk
    fp8-row-vllm-reciprocal  the same s;  q = e4m3(x * (1 / s)): its compiled path, and its CPU
    int8-row-vllm            s = amax / 127;  q = rn(x * (127 / amax)): its CUDA kernel
    int8-row-vllm-reciprocal the same s;  q = rn(x * (1 / s)): its CPU
    nvfp4-pow2               NVFP4 whose outer scale is the power of two at or above absmax / 2688

vLLM computes q, k, v, and gate, up, as one layer with one outer scale, and compressed-tensors stores an outer scale as
its reciprocal. Powers of two survive both: `planning/fused.py` gives siblings the largest one. All divisions are
correctly rounded float32 ones, on every device. Source: vLLM 0.32 `csrc/quantization/w8a8`, `input_quant_fp8.py`,
`nvfp4_emulation_utils.py`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Encoded, Format, Scales
from .blockscaled import NVFP4
from .elements import to_float8
from .float8 import Float8
from .integer import Affine
from .mslk import row_scales
from .scales import absmax, visible


@dataclass(frozen=True)
class Float8Vllm(Float8):
    """e4m3 with a float32 scale per row, by whose reciprocal x is multiplied."""

    name = "fp8-row-vllm-reciprocal"

    def measure(self, x_RK: Tensor) -> Scales:
        return Scales(row_scales(x_RK))

    def quantize(self, x_RK: Tensor, s: Scales) -> Encoded:
        codes = to_float8(x_RK.contiguous().float() * s.scales.reciprocal(), "e4m3")
        return Encoded(codes, s.scales, None, None, x_RK.shape[1])


@dataclass(frozen=True)
class Int8Vllm(Affine):
    """Symmetric int8 with a float32 scale per row; codes are made with 127 / amax, which is not 1 / scale."""

    scales: str = "float32"
    name = "int8-row-vllm"

    def measure(self, x_RK: Tensor) -> Scales:
        amax = absmax(x_RK.contiguous()).unsqueeze(-1).float()
        return Scales(visible(x_RK.unsqueeze(1), amax / torch.full_like(amax, 127.0)))

    def quantize(self, x_RK: Tensor, s: Scales) -> Encoded:
        x_RK = x_RK.contiguous()
        codes = (x_RK.float() * self._inverse(x_RK, s.scales)).round_().clamp_(-128, 127).nan_to_num_(0.0)
        return Encoded(codes.to(torch.int8), s.scales, None, None, x_RK.shape[1])

    def _inverse(self, x_RK: Tensor, scale: Tensor) -> Tensor:
        amax = absmax(x_RK).unsqueeze(-1).float()
        return torch.where(amax == 0, 0.0, torch.full_like(amax, 127.0) / amax)

    def hold(self, x_RK: Tensor, s: Scales) -> Encoded:
        raise ValueError(
            "int8-row-vllm makes its codes from each row's largest value: it takes no held scales; use int8-row"
        )


@dataclass(frozen=True)
class Int8VllmReciprocal(Int8Vllm):
    """The same scales; codes are made with 1 / scale."""

    name = "int8-row-vllm-reciprocal"

    hold = Affine.hold  # codes follow from the scale, so it can be held

    def _inverse(self, x_RK: Tensor, scale: Tensor) -> Tensor:
        return scale.reciprocal()


@dataclass(frozen=True)
class NVFP4PowerOfTwo(NVFP4):
    """NVFP4 with a dynamic outer scale that is a power of two: 2^ceil(log2(absmax / 2688)).

    Under a constant nothing is measured, so `fix` gives plain NVFP4 ("nvfp4-static:...").
    """

    name = "nvfp4-pow2"
    power_of_two = True

    def fix(self, *numbers: float) -> Format:
        return NVFP4().fix(*numbers)

    def measure(self, x_RK: Tensor) -> Scales:
        outer = super().measure(x_RK).outer
        assert outer is not None
        return Scales(outer=at_or_above(outer))


def at_or_above(t: Tensor) -> Tensor:
    """The power of two at or above each positive value; Inf and NaN stay."""
    mantissa, exponent = t.float().frexp()
    power = torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int())
    return torch.where(t.isfinite(), power, t)


VLLM: tuple[Format, ...] = (Float8Vllm(), Int8Vllm(), Int8VllmReciprocal(), NVFP4PowerOfTwo())
