"""Affine integers of 1 to 8 bits as torchao computes them: `choose_qparams_affine` / `quantize_affine`, each step
rounded to x's dtype.

symmetric   s = max(absmax / ((qmax - qmin) / 2), eps);  zp = 0
noclip      s = max(min(x, 0) / qmin, max(x, 0) / qmax, eps);  zp = 0, and no value lies beyond the largest code
asymmetric  s = max((max(x, 0) - min(x, 0)) / (qmax - qmin), eps);  zp = clamp(qmin - rn(min / s))
q = clamp(rn(x * (1 / s)) + zp, qmin, qmax);  value = (q - zp) * s
"""

import re
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import layout
from .base import Encoded, Scales
from .fixed import OneScale, constants, fixed_name
from .scales import absmax, divide, visible

# int8, and int7 in int8's bytes, have float32 scales; int4-g.. is MSLK's format
_NAME = re.compile(
    r"(?:intx([1-8])|int([78]))-(?:g([1-9]\d*)|(row|tensor))(?:-(asym|noclip))?(?:-s(float32|bfloat16|float16))?(-native)?(-wide)?"
)
_LEAST = 2.0**-24  # positive float16
_SUFFIX = {"symmetric": "", "asymmetric": "-asym", "noclip": "-noclip"}


@dataclass(frozen=True)
class Affine(OneScale):
    """Integers of `width` bits with one scale per group, row or tensor. Source: torchao 0.18 `quant_primitives`.

    scales: "input" keeps scale and arithmetic in x's dtype (IntxUnpackedToInt8Tensor); "float32" stores a float32
        scale, made in x's dtype with float32's eps, and quantises in float32 (Int8Tensor).
    native: divide as x's device does; for activations that torchao quantises again at run time.
    fixed: (scale,) or (scale, zero point), constants instead of ones made from x; per tensor only.
    stored: with scales "input", the dtype that the finished scale is cast to before anything is quantised with it; ""
        is x's.
    wide: x is taken as float32, for a float16 x whose scales leave its range; with scales "input" they are stored in
        float16, down to its smallest number.
    """

    width: int = 8
    per: str = "row"  # "group" | "row" | "tensor"
    group: int = 0
    mapping: str = "symmetric"  # | "asymmetric" | "noclip"
    scales: str = "input"  # | "float32"
    native: bool = False
    stored: str = ""  # | "float32" | "bfloat16" | "float16"
    wide: bool = False

    @classmethod
    def parse(cls, name: str) -> "Affine | None":
        """The format called `name`; None when it is no affine format's name."""
        if (match := _NAME.fullmatch(name)) is None:
            return None
        intx, int_, group, per, suffix, stored, native, wide = match.groups()
        mapping = next(m for m, s in _SUFFIX.items() if s == (f"-{suffix}" if suffix else ""))
        scales = "input" if intx else "float32"
        bits = int(intx or int_)
        return cls(bits, per or "group", int(group or 0), mapping, scales, bool(native), stored or "", bool(wide))

    @property
    def name(self) -> str:
        kind = "int" if self.scales == "float32" else "intx"
        per = f"g{self.group}" if self.per == "group" else self.per
        stored = f"-s{self.stored}" if self.stored else ""
        native = "-native" if self.native else ""
        wide = "-wide" if self.wide else ""
        return f"{kind}{self.width}-{per}{_SUFFIX[self.mapping]}{stored}{native}{wide}{fixed_name(self.fixed)}"

    @property
    def widened(self) -> "Affine | None":
        return replace(self, wide=True) if type(self) is Affine and not self.fixed else None

    @property
    def narrow_of_float32(self) -> bool:
        return self.wide and "float32" in (self.scales, self.stored)

    @property
    def narrow(self) -> "Affine":
        return replace(self, wide=False) if self.wide else self

    element = standard = "int"

    @property
    def bits(self) -> int:
        return self.width

    @property
    def block(self) -> int | None:
        return self.group if self.per == "group" else None

    @property
    def learnable(self) -> bool:
        return not self.fixed

    @property
    def limits(self) -> tuple[int, int]:
        """Smallest and largest code."""
        return -(1 << (self.width - 1)), (1 << (self.width - 1)) - 1

    @property
    def widest(self) -> str:
        return "block" if self.block else self.per

    @property
    def constants(self) -> int:
        return 2 if self.mapping == "asymmetric" else 1

    def measure(self, x_RK: Tensor) -> Scales:
        if self.fixed:
            s = self.rowwise(Scales(*constants(self.fixed, x_RK.device)), x_RK.shape[0])
            return s._replace(scale=self._visible(x_RK, s.scale))
        x_RGB = self._scaled_blocks(x_RK)
        scale, zero = self._qparams(x_RGB)
        shape = x_RGB.shape[:2]  # (1, 1) per tensor, else (R, G)
        return Scales(scale.reshape(shape), zero.reshape(shape) if self.mapping == "asymmetric" else None)

    def hold(self, x_RK: Tensor, s: Scales) -> Encoded:
        return self.quantize(x_RK, s._replace(scale=self._visible(x_RK, s.scale)))

    def rowwise(self, s: Scales, rows: int) -> Scales:
        if self.per != "tensor" or s.scale is None:
            return s
        return Scales(s.scale.expand(rows, 1), s.zero, s.outer, s.transform)

    def quantize(self, x_RK: Tensor, s: Scales) -> Encoded:
        x_RGB = self._scaled_blocks(x_RK, s.scale)
        scale, zero = self._broadcast(s.scale, s.zero, x_RGB.dtype)
        low, high = self.limits
        q = self._code(x_RGB, scale, zero).clamp_(low, high).nan_to_num_(0.0)
        codes = q.to(torch.int8).reshape(x_RK.shape)
        if self.width < 8:
            codes = layout.pack((codes - low).view(torch.uint8), self.width)
        return Encoded(codes, scale.squeeze(-1), s.zero, None, x_RK.shape[1])

    def integers(self, e: Encoded) -> Tensor:
        """(R, K) int8 codes, unpacked."""
        if self.width == 8:
            return e.codes
        return layout.unpack(e.codes, self.width, e.k).contiguous().view(torch.int8).add_(self.limits[0])

    def operand(self, e: Encoded, dtype: torch.dtype) -> Tensor:
        if self.per == "group":
            return self.decode(e, dtype)
        return self._centred(e).to(dtype)  # |q - zp| <= 255: exact in bf16

    def alpha(self, e: Encoded) -> Tensor | None:
        return None if self.per == "group" else e.scales.float()

    def decode(self, e: Encoded, dtype: torch.dtype) -> Tensor:
        inner = torch.float32 if self.stored else e.scales.dtype
        q_RGB = self._blocks(self._centred(e)) if self.per == "group" else self._centred(e).unsqueeze(1)
        return q_RGB.mul_(e.scales.float().unsqueeze(-1)).flatten(1).to(inner).to(dtype)

    def saturated(self, x_RK: Tensor, e: Encoded) -> Tensor:
        x_RGB = self._scaled_blocks(x_RK, e.scale)
        code = self._code(x_RGB, *self._broadcast(e.scale, e.zero, x_RGB.dtype))
        low, high = self.limits
        return ((code < low) | (code > high)).reshape(x_RK.shape)

    def floored(self, e: Encoded) -> Tensor:
        least = e.scales <= _LEAST if e.scales.dtype == torch.float16 else False
        return (e.scales == self._eps(e.scales.dtype)) | least

    def scale_gradient(self, x_RK: Tensor, s: Scales, grad_RK: Tensor) -> Tensor:
        """Return the (R, G) float32 gradient of each scale: the sum of grad * d value / d scale over the values that
        share it.

        value = clamp(rn(x / s)) * s with rn straight through: the derivative is rn(x / s) - x / s, and the largest or
        smallest code where the code is clipped. Source: Esser et al. 2020, equation 3; here a value counts as clipped
        when its rounded code is.
        """
        x_RGB = self._scaled_blocks(x_RK)
        scale, zero = self._broadcast(s.scale, s.zero, x_RGB.dtype)
        code = self._code(x_RGB, scale, zero).nan_to_num(0.0)  # 0 / 0, where a scale is stored as 0
        clamped = code.clamp(*self.limits)
        centred = clamped.float() - zero.float()
        ratio = x_RGB.float() / scale.float().clamp(min=torch.finfo(torch.float32).tiny)
        slope = torch.where(clamped == code, centred - ratio, centred)
        return (slope * self._scaled_blocks(grad_RK).float()).sum(-1)

    def _eps(self, dtype: torch.dtype) -> float:
        return torch.finfo(torch.float32).eps if self.scales == "float32" else torch.finfo(dtype).smallest_normal

    def _scaled_blocks(self, x_RK: Tensor, scale: Tensor | None = None) -> Tensor:
        """(R, G, values that share a scale). scale: the tensor's may be given for every row (`rowwise`)."""
        x_RK = x_RK.float() if self.wide else x_RK
        whole = self.per == "tensor" and (scale is None or scale.shape[0] == 1)
        return x_RK.reshape(1, 1, -1) if whole else self._blocks(x_RK)

    def _visible(self, x_RK: Tensor, scale: Tensor | None) -> Tensor:
        """`scale`, NaN where a value under it is."""
        assert scale is not None
        return visible(self._scaled_blocks(x_RK, scale), scale)

    def _qparams(self, x_RGB: Tensor) -> tuple[Tensor, Tensor]:
        """Scale and int8 zero point, (R, G, 1)."""
        low, high = self.limits
        eps = self._eps(x_RGB.dtype)
        if self.mapping == "symmetric":
            scale = divide(absmax(x_RGB).unsqueeze(-1), (high - low) / 2, native=self.native).clamp(min=eps)
            return scale, torch.zeros_like(scale, dtype=torch.int8)
        if x_RGB.numel() == 0:
            smallest = largest = x_RGB.new_zeros(*x_RGB.shape[:-1], 1)
        else:
            wide = (
                x_RGB.float()
            )  # PyTorch reduces it many times faster, and an extreme is the same number in every dtype
            smallest = wide.amin(-1, keepdim=True).clamp(max=0).to(x_RGB.dtype)
            largest = wide.amax(-1, keepdim=True).clamp(min=0).to(x_RGB.dtype)
        if self.mapping == "asymmetric":
            scale = divide(largest - smallest, float(high - low), native=self.native).clamp(min=eps)
            zero = (low - (smallest / scale).round()).clamp(low, high).nan_to_num(0.0)
            return scale, zero.to(torch.int8)
        below = divide(smallest, float(low), native=self.native)
        scale = torch.maximum(below, divide(largest, float(high), native=self.native)).clamp(min=eps)
        return scale, torch.zeros_like(scale, dtype=torch.int8)

    def _broadcast(self, scale: Tensor | None, zero: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Scale as it is stored, at least eps since a learned one may fall below zero, and zero point, (R, G, 1)."""
        assert scale is not None
        narrow = getattr(torch, self.stored) if self.stored else torch.float16 if self.wide else dtype
        stored = torch.float32 if self.scales == "float32" else narrow
        least = _LEAST if self.wide and stored == torch.float16 else self._eps(dtype)
        scale = scale.to(stored).clamp(min=least).unsqueeze(-1)
        return scale, torch.zeros_like(scale) if zero is None else zero.unsqueeze(-1)

    def _code(self, x_RGB: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """Codes before clamping, float32."""
        # a product of two bf16 is their float32 product, rounded: said so, the passes over it are float32's, which are
        # faster
        if self.wide:
            scale = scale.float()  # whose inverse may be no float16
        q = (x_RGB.float() * (1.0 / scale).float()).to(torch.promote_types(x_RGB.dtype, scale.dtype)).float().round_()
        return q.add_(zero) if self.mapping == "asymmetric" else q

    def _centred(self, e: Encoded) -> Tensor:
        """(R, K) float32 q - zp; the zero point is per row or per tensor wherever there is one."""
        q = self.integers(e).float()
        if e.zero is None:
            return q
        if self.per == "group":
            return self._blocks(q).sub_(e.zero.unsqueeze(-1)).flatten(1)
        return q.sub_(e.zero)
