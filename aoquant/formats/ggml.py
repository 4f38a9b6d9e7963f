"""ggml's blocks of 32: Q4_0, Q4_1 and Q8_0, float16 scales. llama.cpp's storage and its own quantiser's rounding.

    q4_0        d = x_m / -8, x_m the first value of the largest magnitude, with its sign
                q = min(15, trunc(x * (1 / d) + 8.5));  value = (q - 8) * f16(d)
    q4_1        d = (max - min) / 15, min the first of two zeros;  q = clamp(trunc((x - min) * (1 / d) + 0.5), 0, 15)
                value = q * f16(d) + f16(min)
    q8_0        d = amax / 127;  q = round(x * (1 / d)), half away from zero;  value = q * f16(d)
    q8_0-x86    the same with q = rn(x * (127 / amax)), half to even: so ggml's x86 kernels encode activations

Codes are made with d as it is, float32, before it is stored as float16. Products of a code and a scale are exact in
float32, so a value is rounded at most once (q4_1's sum). Sources: ggml `quantize_row_q4_0_ref` and its like,
`gguf.quants`, `ggml-cpu/arch/x86/quants.c`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from . import layout
from .base import Encoded, Format, Scales
from .scales import absmax, quotient, visible

KINDS = ("q4_0", "q4_1", "q8_0", "q8_0-x86")


@dataclass(frozen=True)
class Ggml(Format):
    """kind: one of `KINDS`. codes: nibbles 0..15 (uint8) or int8; scale (R, K / 32) float16; zero, q4_1's minimum: the
    same.
    """

    kind: str = "q4_0"

    @property
    def name(self) -> str:
        return self.kind

    @property
    def bits(self) -> int:
        return 8 if self.kind.startswith("q8") else 4

    @property
    def standard(self) -> str:
        return self.kind.removesuffix("-x86")

    @property
    def limits(self) -> tuple[int, int]:
        return (-127, 127) if self.bits == 8 else (0, 15)

    block = 32  # no property: every pass over blocks asks

    def measure(self, x_RK: Tensor) -> Scales:
        x_RGB = self._blocks(x_RK).float()
        if self.kind == "q4_1":
            low, high = (x_RGB.amin(-1), x_RGB.amax(-1)) if x_RGB.numel() else (x_RGB.sum(-1), x_RGB.sum(-1))
            return Scales(visible(x_RGB, quotient(high - low, 15.0)), _first(x_RGB, x_RGB == low.unsqueeze(-1)))
        amax = absmax(x_RGB)
        if self.bits == 8:
            return Scales(quotient(amax, 127.0))
        return Scales(visible(x_RGB, _first(x_RGB, x_RGB.abs() == amax.unsqueeze(-1)) / -8.0))

    def hold(self, x_RK: Tensor, s: Scales) -> Encoded:
        return self.quantize(x_RK, s._replace(scale=visible(self._blocks(x_RK), s.scales)))

    def quantize(self, x_RK: Tensor, s: Scales) -> Encoded:
        x_RGB, d_RG1 = self._blocks(x_RK).float(), s.scales.float().unsqueeze(-1)
        if self.kind == "q8_0-x86":  # 127 / amax is not 1 / d: each is rounded once
            amax = absmax(x_RGB).unsqueeze(-1)
            q = (x_RGB * torch.where(amax != 0, torch.full_like(amax, 127.0) / amax, 0.0)).round_()
        else:
            inverse = torch.where(d_RG1 == 0, 0.0, d_RG1.reciprocal())
            q = self._round(x_RGB, inverse, s.zero)
        q = q.clamp_(*self.limits).nan_to_num_(0.0).flatten(1)
        codes = q.to(torch.int8) if self.bits == 8 else layout.pack(q.to(torch.uint8), 4)
        return Encoded(codes, _half(s.scales), None if s.zero is None else _half(s.zero), None, x_RK.shape[1])

    def operand(self, e: Encoded, dtype: torch.dtype) -> Tensor:
        values = self._blocks(self.integers(e).float()).mul_(e.scales.float().unsqueeze(-1))
        return (values if e.zero is None else values.add_(e.zero.float().unsqueeze(-1))).flatten(1).to(dtype)

    def integers(self, e: Encoded) -> Tensor:
        """(R, K) int8: the integers that the scale multiplies."""
        if self.bits == 8:
            return e.codes
        q = layout.unpack(e.codes, 4, e.k).contiguous().view(torch.int8)
        return q - 8 if self.kind == "q4_0" else q

    def saturated(self, x_RK: Tensor, e: Encoded) -> Tensor:
        """Values more than half a step beyond the largest code: q4_0's largest is 7 where its smallest is -8."""
        x_RGB, d = self._blocks(x_RK).float(), e.scales.float().unsqueeze(-1)
        if self.kind != "q4_0":
            return torch.zeros_like(x_RK, dtype=torch.bool)
        return (x_RGB * torch.where(d == 0, 0.0, d.reciprocal()) >= 7.5).flatten(1)

    def floored(self, e: Encoded) -> Tensor:
        return e.scales.float().abs() <= torch.finfo(torch.float16).smallest_normal

    def _round(self, x_RGB: Tensor, inverse: Tensor, low: Tensor | None) -> Tensor:
        """Codes before clamping."""
        if self.kind == "q4_0":
            return (x_RGB * inverse + 8.5).trunc_()
        if low is not None:
            return ((x_RGB - low.unsqueeze(-1)) * inverse + 0.5).trunc_()
        v = x_RGB * inverse
        whole = v.abs().floor()
        return (whole + ((v.abs() - whole) >= 0.5)).copysign_(v)


def _first(x_RGB: Tensor, chosen: Tensor) -> Tensor:
    """(R, G): the first value of a block among the chosen ones: which of two signs, or of two zeros, it is."""
    return x_RGB.gather(-1, chosen.to(torch.uint8).argmax(-1, keepdim=True)).squeeze(-1)


def _half(t: Tensor) -> Tensor:
    """float16, Inf where it overflows as in ggml: the block is then visibly broken."""
    return t.to(torch.float16)
