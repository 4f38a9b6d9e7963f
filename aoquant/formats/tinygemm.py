"""int4 for PyTorch's own kernels, "tinygemm": `aten::_weight_int4pack_mm` on CUDA, `aten::_weight_int4pack_mm_for_cpu`
on a CPU.

torchao's quantiser for them rounds every step to the weight's dtype:

    s = max((max - min) / 15, eps);  z = min + 8 s;  m = z - 8 s;  q = clamp(rn((w - m) / s), 0, 15) - 8
    eps: the dtype's smallest normal number for the CUDA layout (tile packed to 4-D), 1e-6 for the CPU layout (opaque)

On CUDA the operand is rn_bf16(q * s + z), one rounding, as MSLK's is. On a CPU it stays in float32, by a rule that
follows the vector instructions that PyTorch uses (`torch.backends.cpu.get_cpu_capability()`):

    bfloat16 on AVX512    fma(q, s, z)
    bfloat16 on AVX2      fma(q + 8, s, fma(s, -8, z)): 8 s is folded into z first, a rounding more
    other dtypes          fma(q, s, z), the same on both
    without either        rn(rn(q * s) + z)

`hqq` names HQQ's scales and zero points instead of the extremes' (hqq.py). Sources: torchao 0.18
`_choose_qparams_affine_tinygemm`, `_quantize_affine_tinygemm`; PyTorch 2.13 aten/src/ATen/native/cpu/int4mm_kernel.cpp,
checked against the operator for each rule.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Encoded, Scales
from .hqq import NOT_HELD, affine
from .int4 import Int4
from .scales import divide, solved

CPU_EPS = 1e-6


@dataclass(frozen=True)
class TinyGemm(Int4):
    """int4 per group, asymmetric, in torchao's tinygemm dialect. device: "cuda" or "cpu", whose kernel it is for."""

    device: str = "cuda"
    hqq: bool = False

    @property
    def name(self) -> str:
        return f"int4-tinygemm{'-cpu' if self.device == 'cpu' else ''}{'-hqq' if self.hqq else ''}-g{self.group}"

    @property
    def reach(self) -> str:
        return "tensor" if self.hqq else "block"  # HQQ stops for all rows at once

    @property
    def from_extremes(self) -> bool:
        return not self.hqq

    def operand(self, e: Encoded, dtype: torch.dtype) -> Tensor:
        assert e.zero is not None
        if self.device == "cuda":
            return super().operand(e, torch.bfloat16).to(dtype)
        if dtype != torch.float32 or e.scales.dtype != torch.float32:
            if e.scales.dtype == torch.bfloat16 and dtype == torch.float32 and _capability() == "AVX2":
                return self._folded(e)
            return super().operand(e, dtype)
        if _capability() in ("AVX512", "AVX2"):
            return super().operand(e, dtype)
        q_RGB = self._blocks(self.integers(e))
        return (q_RGB * e.scales.unsqueeze(-1) + e.zero.unsqueeze(-1)).flatten(1)

    def floored(self, e: Encoded) -> Tensor:
        return e.scales <= torch.full_like(e.scales, self._eps(e.scales.dtype))

    def _folded(self, e: Encoded) -> Tensor:
        """AVX2's rule for bfloat16. Products of 4 and 8 bits are exact, so each line rounds once."""
        assert e.zero is not None
        scale, zero = e.scales.float().unsqueeze(-1), e.zero.float().unsqueeze(-1)
        return ((self._blocks(self.integers(e)) + 8) * scale + (zero - 8 * scale)).flatten(1)

    def _eps(self, dtype: torch.dtype) -> float:
        return CPU_EPS if self.device == "cpu" else torch.finfo(dtype).smallest_normal

    @property
    def portable(self) -> bool:
        return not self.hqq

    def measure(self, x_RK: Tensor) -> Scales:
        if self.hqq:
            raise ValueError(NOT_HELD.format(self.name))
        x_RGB = self._blocks(x_RK)
        low, high = x_RGB.amin(-1), x_RGB.amax(-1)
        # the CPU layout is made on CPUs, which divide; see scales.py for what CUDA does
        span = high - low
        scale = span / torch.full_like(span, 15.0) if self.device == "cpu" else divide(span, 15.0)
        return Scales(scale.clamp(min=self._eps(x_RK.dtype)), low)

    def held(self, e: Encoded) -> Scales:
        if self.hqq:
            raise ValueError(NOT_HELD.format(self.name))
        assert e.zero is not None
        eight = 8 * e.scales
        low = solved(lambda low: low + eight, e.zero - eight, e.zero)  # each step rounds to the weight's dtype
        return Scales(e.scales.float(), low.float())

    def encode(self, x_RK: Tensor, held: Scales | None = None) -> Encoded:
        if not self.hqq:
            return super().encode(x_RK, held)
        if held is not None:
            raise ValueError(NOT_HELD.format(self.name))
        dtype = torch.float32 if self.device == "cpu" else torch.float16
        parts = [self._packed(*some) for some in affine(self._blocks(x_RK), dtype)]

        def joined(part: str) -> Tensor:
            tensors = [getattr(e, part) for e in parts]
            # as bytes: on a CPU autocast joins no float16
            return torch.cat([t.view(torch.uint8) for t in tensors]).view(tensors[0].dtype)

        return Encoded(joined("codes"), joined("scale"), joined("zero"), None, x_RK.shape[1])

    def _codes(self, x_RGB: Tensor, s: Scales) -> tuple[Tensor, Tensor, Tensor | None]:
        assert s.zero is not None
        # held scales are float32
        scale = s.scales.to(x_RGB.dtype).unsqueeze(-1)
        zero = s.zero.to(x_RGB.dtype).unsqueeze(-1) + 8 * scale
        q = ((x_RGB - (zero - 8 * scale)) / scale).round().clamp(0, 15) - 8
        return q.float(), scale.squeeze(-1), zero.squeeze(-1)


def fused_sums() -> bool:
    """Return whether the CPU kernel's sums over k are fused multiply-adds here; without AVX they round the product
    first.
    """
    return _capability() in ("AVX512", "AVX2")


def _capability() -> str:
    return str(torch.backends.cpu.get_cpu_capability())
