"""HQQ: scales and zero points that a few iterations fit to the weights (half-quadratic quantisation, Badri & Shaji 2023).

Two solvers, as torchao runs them at conversion, and therefore here in every forward:

`affine`, for int4 (`Int4ChooseQParamsAlgorithm.HQQ`). With r = 15 / (max - min), capped at 2e4, and zero point b = rn(-min r), twenty times:

    q = clamp(rn(w r + b), 0, 15);  v = (q - b) / r;  e = shrink(w - v)
    b = mean over the group of (q - (w - e) r);  beta = 1.01 beta          until the mean of |w - v| over the matrix stops falling
    shrink(x) = sign(x) relu(|x| - |x|^-0.3 / beta), beta = 10 at first

then q again, s = 1 / r, z = (8 - b) s. The iterations run in float32 for a CPU and in float16 for CUDA.

`scale_only`, for symmetric integers (`IntxChooseQParamsAlgorithm.HQQ_SCALE_ONLY`), float32. From s = absmax / 2^(bits - 1), twenty times:

    q = clamp(rn(w / s));  s = sum(w q) / sum(q q), at least float32's eps     until no scale of the matrix moves by more than 1e-5 of itself

Both stop for the whole matrix at once, so a row depends on its neighbours; and sums over a group are taken in the order of the
device, so codes made on a CPU and on a GPU may differ in a few last places. Prepare and convert on one device, as torchao converts.
Stopping is a mask over the iterations and no branch, so that nothing waits for a device and shapes can be traced.
Source: torchao 0.18 `quant_primitives`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import layout
from .base import Encoded, Scales
from .integer import Affine
from .scales import absmax

ITERATIONS = 20
BETA, GROWTH, POWER = 1e1, 1.01, 0.7 - 1
LARGEST_INVERSE = 2e4
WORST_ERROR = 1e4
TOLERANCE = 1e-5
EPS = torch.finfo(torch.float32).eps
NOT_HELD = "{}: HQQ fits scales and codes to each other, so its scales cannot be held apart: choose scales='dynamic'"


def affine(x_RGB: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q (R, G, group) in -8..7 as floats, scale and zero (R, G) in x's dtype; the iterations run in `dtype`."""
    w = x_RGB.float().flatten(0, 1)  # (R G, group): the order of a sum depends on the shape
    if w.numel() == 0:
        return x_RGB.float(), x_RGB.new_zeros(x_RGB.shape[:2]), x_RGB.new_zeros(x_RGB.shape[:2])
    low, high = w.amin(1, keepdim=True), w.amax(1, keepdim=True)
    inverse = ((high - low).reciprocal() * 15).clamp(max=LARGEST_INVERSE)
    zero = (-low * inverse).round()
    inverse, zero, v = inverse.to(dtype), zero.to(dtype), w.to(dtype)
    beta, best = BETA, torch.full((), WORST_ERROR, dtype=dtype, device=w.device)
    running = torch.ones((), dtype=torch.bool, device=w.device)
    for _ in range(ITERATIONS):
        q = (v * inverse + zero).round().clamp(0, 15)
        error = v - (q - zero) / inverse
        moved = torch.mean(q - (v - _shrink(error, beta)) * inverse, 1, keepdim=True)
        zero = torch.where(running, moved, zero)
        beta *= GROWTH
        size = error.abs().mean()
        running = running & (size < best)
        best = size
    q = (w * inverse + zero).round().clamp(0, 15) - 8
    scale = inverse.reciprocal()
    shift = ((8 - zero.float()) * scale.float()).to(dtype)
    shape = x_RGB.shape[:2]
    return q.view(x_RGB.shape), scale.to(x_RGB.dtype).view(shape), shift.to(x_RGB.dtype).view(shape)


def _shrink(x: Tensor, beta: float) -> Tensor:
    """The proximal operator of the 0.7-norm."""
    return x.sign() * torch.relu(x.abs() - (1.0 / beta) * torch.pow(x.abs(), POWER))


def scale_only(x_RGB: Tensor, low: int, high: int) -> tuple[Tensor, Tensor]:
    """q (R, G, group) in low..high and scale (R, G), both float32."""
    w = x_RGB.float()
    scale = (absmax(w) / max(-low, high)).clamp(min=EPS)
    if w.numel() == 0:
        return w, scale
    running = torch.ones((), dtype=torch.bool, device=w.device)
    for _ in range(ITERATIONS):
        q = (w / scale.unsqueeze(-1)).round().clamp(low, high)
        products, squares = (w * q).sum(2, dtype=torch.float32), (q * q).sum(2, dtype=torch.float32)
        fitted = torch.where(squares > 0, products / squares, scale).clamp(min=EPS).abs()
        step = ((fitted - scale).abs() / scale).max()
        scale = torch.where(running, fitted, scale)
        running = running & ~(step < TOLERANCE)
    return (w / scale.unsqueeze(-1)).round().clamp(low, high), scale


@dataclass(frozen=True)
class AffineHQQ(Affine):
    """Symmetric integers of 2 to 8 bits whose scales HQQ chooses, per group or row; stored in the weight's dtype."""

    @property
    def name(self) -> str:
        return f"{super().name}-hqq"

    @property
    def reach(self) -> str:
        return "tensor"  # the solver stops for all rows at once

    @property
    def from_extremes(self) -> bool:
        return False

    @property
    def portable(self) -> bool:
        return False

    def measure(self, x_RK: Tensor) -> Scales:
        raise ValueError(NOT_HELD.format(self.name))

    def encode(self, x_RK: Tensor, held: Scales | None = None) -> Encoded:
        if held is not None:
            raise ValueError(NOT_HELD.format(self.name))
        low, high = self.limits
        q, scale = scale_only(self._blocks(x_RK), low, high)
        codes = q.nan_to_num(0.0).to(torch.int8).flatten(1)
        if self.width < 8:
            codes = layout.pack((codes - low).view(torch.uint8), self.width)
        return Encoded(codes, scale.to(x_RK.dtype), None, None, x_RK.shape[1])

    def saturated(self, x_RK: Tensor, e: Encoded) -> Tensor:
        low, high = self.limits
        x_RGB = self._blocks(x_RK)
        q = (x_RGB.float() / scale_only(x_RGB, low, high)[1].unsqueeze(-1)).round()
        return ((q < low) | (q > high)).flatten(1)

    def floored(self, e: Encoded) -> Tensor:
        assert e.scale is not None
        return e.scale.float() <= EPS
