"""int4 weights: one class for the numerics of each kernel.

Five deployed layouts hold a 4-bit code and a scale, and no two of them compute the same numbers. They share this: a
code is q in -8..7, packed with even k in the low nibble, and the operand is a rounding of q * s + z.

`Int4`: asymmetric, float32 throughout, for bf16 activations (MSLK / FBGEMM `bf16i4bf16`, plain and preshuffled):

    s = max(max - min, 1e-6) / 15;  z = min + 8 s;  q = clamp(rn((w - min) / s), 0, 15) - 8
    then s and z are rounded to w.dtype
    operand = rn(q * s + z), one rounding, by the kernel's fused multiply-add before the tensor core

The preshuffled layout rounds s and z to bf16 whatever the weight is: "int4-bf16-g128".

`Int4Float8`: symmetric, for fp8 activations, torchao's plain layout (MSLK `f8i4bf16_rowwise`):

    s = max(absmax, 1e-6) / 8;  q = clamp(rn(w / s), -8, 7)      then s rounded to w.dtype
    operand = rn_e4m3(rn(q * s)), the inner rounding to s's dtype; no row scale, so weights below 2^-9 round to nothing

`Int4Float8Row`: the same activations, preshuffled layout (MSLK `f8i4bf16_shuffled`). Rows are quantised to fp8 first,
and int4 then quantises the fp8 codes, in code units:

    row = max(absmax of the row, 1/512) / 448;  c = e4m3(w / row);  s, q of c as above;  s rounded to e4m3
    operand = rn_e4m3(q * s);  the row scale multiplies the accumulator

Sources: MSLK 1.1 `int4_row_quantize_zp`, `int4_row_quantize`, `quantize_int4_preshuffle`; operands read from the
kernels on an H200 with identity matrices, in bf16 and float32 scales (benchmarks/results/int4_h200.txt). The fp8
kernels' epilogues are rn_bf16(x_scale * acc), plain, and rn_bf16(row * (x_scale * acc)), preshuffled; torchao adds the
bias to that and rounds again.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from . import layout
from .base import Encoded, Format, Scales
from .elements import fma_round, from_float8, to_float8
from .mslk import row_codes, row_scales
from .scales import absmax, divide, solved, visible

INT4_EPS = 1e-6  # on the range of a group, before the division


@dataclass(frozen=True)
class Int4(Format):
    """int4 per group along K, asymmetric; scale and zero in the weight's dtype ("input"), or in "bfloat16"."""

    group: int = 128
    scales: str = "input"
    element = "int4"
    per = "group"
    limits = (0, 15)  # of a code before 8 is taken off
    bits = 4
    clips_when_held = False  # the range of a group covers its values by construction

    @property
    def name(self) -> str:
        return f"int4{'-bf16' if self.scales == 'bfloat16' else ''}-g{self.group}"

    @property
    def block(self) -> int:
        return self.group

    def _eps(self, dtype: torch.dtype) -> float:
        return INT4_EPS

    def scale_dtype(self, source: torch.dtype) -> torch.dtype:
        return torch.bfloat16 if self.scales == "bfloat16" else source

    def measure(self, x_RK: Tensor) -> Scales:
        x_RGB = self._blocks(x_RK).float()
        low, high = x_RGB.amin(-1), x_RGB.amax(-1)
        return Scales(divide((high - low).clamp(min=INT4_EPS), 15.0), low)

    def hold(self, x_RK: Tensor, s: Scales) -> Encoded:
        return self.quantize(x_RK, s._replace(scale=visible(self._blocks(x_RK), s.scales)))

    def held(self, e: Encoded) -> Scales:
        """A layer holds the value of the smallest code, and codes are stored with that of the ninth."""
        if e.zero is None:
            return super().held(e)
        scale, zero = e.scales.float(), e.zero
        return Scales(scale, solved(lambda low: (low + 8 * scale).to(zero.dtype), zero.float() - 8 * scale, zero))

    def inside(self, e: Encoded) -> Tensor:
        """Before the operand's rounding, which may join codes."""
        values = self._blocks(self.integers(e)).mul_(e.scales.float().unsqueeze(-1))
        return (values if e.zero is None else values.add_(e.zero.float().unsqueeze(-1))).flatten(1)

    def quantize(self, x_RK: Tensor, s: Scales) -> Encoded:
        return self._packed(*self._codes(self._blocks(x_RK), s))

    def integers(self, e: Encoded) -> Tensor:
        """(R, K) float32 codes, -8..7."""
        two_complement = torch.arange(16, device=e.codes.device) ^ 8
        return layout.lookup(e.codes, two_complement.float() - 8, e.k)

    def operand(self, e: Encoded, dtype: torch.dtype) -> Tensor:
        assert e.zero is not None
        return fma_round(self._blocks(self.integers(e)), e.scales.unsqueeze(-1), e.zero.unsqueeze(-1), dtype).flatten(1)

    def saturated(self, x_RK: Tensor, e: Encoded) -> Tensor:
        return torch.zeros_like(x_RK, dtype=torch.bool)  # the range of a group is covered by construction

    def floored(self, e: Encoded) -> Tensor:
        floor = divide(e.scales.new_full((), INT4_EPS, dtype=torch.float32), 15.0).to(e.scales.dtype)
        return e.scales <= floor  # a constant group is stored exactly as its zero point, so only noise is lost

    def _packed(self, q_RGB: Tensor, scale_RG: Tensor, zero_RG: Tensor | None) -> Encoded:
        # in two's complement: flipping the top bit of q + 8
        codes = layout.pack(
            q_RGB.nan_to_num(0.0).add_(8).to(torch.int8).view(torch.uint8).flatten(1).bitwise_xor_(8), 4
        )
        return Encoded(codes, scale_RG, zero_RG, None, q_RGB.shape[1] * q_RGB.shape[2])

    def _codes(self, x_RGB: Tensor, s: Scales) -> tuple[Tensor, Tensor, Tensor | None]:
        """q (R, G, group) in -8..7, as floats; scale and zero (R, G) as they are stored."""
        assert s.zero is not None
        dtype = self.scale_dtype(x_RGB.dtype)
        scale, low = s.scales.unsqueeze(-1), s.zero.unsqueeze(-1)
        zero = low + 8 * scale
        q = (x_RGB.float() - low).div_(scale).round_().clamp_(0, 15).sub_(8)
        return q, scale.squeeze(-1).to(dtype), zero.squeeze(-1).to(dtype)


@dataclass(frozen=True)
class Int4Float8(Int4):
    """int4 per group, symmetric, operand rounded to e4m3: torchao's Int4Tensor with float8 activations."""

    @property
    def name(self) -> str:
        return f"int4-e4m3-g{self.group}"

    def measure(self, x_RK: Tensor) -> Scales:
        return Scales(absmax(self._blocks(x_RK)).float().clamp(min=INT4_EPS) / 8)  # exact

    def operand(self, e: Encoded, dtype: torch.dtype) -> Tensor:
        scaled = self._blocks(self.integers(e)).mul_(e.scales.float().unsqueeze(-1))
        return from_float8(to_float8(scaled.to(self._inner(e.scales)).float(), "e4m3"), dtype).flatten(1)

    def saturated(self, x_RK: Tensor, e: Encoded) -> Tensor:
        s = self.measure(x_RK)
        return (self._rounded(self._blocks(self._source(x_RK, s)), s) > 7).flatten(1)

    def floored(self, e: Encoded) -> Tensor:
        holds_codes = (self._blocks(self.integers(e)) != 0).any(-1)
        return (self._blocks(self.operand(e, torch.float32)) == 0).all(-1) & holds_codes

    def _inner(self, scale: Tensor) -> torch.dtype:
        """The dtype that q * s is rounded to on its way to e4m3."""
        return scale.dtype

    def _source(self, x_RK: Tensor, s: Scales) -> Tensor:
        """The values that int4 quantises."""
        return x_RK

    def _rounded(self, x_RGB: Tensor, s: Scales) -> Tensor:
        """Codes before clamping."""
        return (x_RGB.float() / s.scales.unsqueeze(-1)).round_()

    def _codes(self, x_RGB: Tensor, s: Scales) -> tuple[Tensor, Tensor, Tensor | None]:
        return self._rounded(x_RGB, s).clamp_(-8, 7), s.scales.to(x_RGB.dtype), None


@dataclass(frozen=True)
class Int4Float8Row(Int4Float8):
    """int4 per group of the e4m3 codes of a row, e4m3 group scales, a float32 scale per row: Int4PreshuffledTensor,
    float8 activations.
    """

    reach = "row"
    from_extremes = False  # int4 quantises the codes of the row

    @property
    def name(self) -> str:
        return f"int4-e4m3-row-g{self.group}"

    def measure(self, x_RK: Tensor) -> Scales:
        outer = row_scales(x_RK)
        return super().measure(row_codes(x_RK, outer).float())._replace(outer=outer)

    def quantize(self, x_RK: Tensor, s: Scales) -> Encoded:
        e = super().quantize(self._source(x_RK, s), s)
        return e._replace(scale=to_float8(e.scales, "e4m3"), outer=s.outer)

    def inside(self, e: Encoded) -> Tensor:
        assert e.outer is not None
        return super().inside(e).mul_(e.outer)

    def _inner(self, scale: Tensor) -> torch.dtype:
        return torch.float32  # q * s is exact there: 4 and 4 bits

    def _source(self, x_RK: Tensor, s: Scales) -> Tensor:
        assert s.outer is not None
        return row_codes(x_RK, s.outer).float()
