"""HQQ: scales and zero points that a few iterations fit to the weights (half-quadratic quantisation, Badri & Shaji
2023).

Two solvers, as torchao runs them at conversion, and therefore here in every forward:

`affine`, for int4 (`Int4ChooseQParamsAlgorithm.HQQ`). With r = 15 / (max - min), capped at 2e4, and zero point b =
rn(-min r), twenty times:

    q = clamp(rn(w r + b), 0, 15);  v = (q - b) / r;  e = shrink(w - v)
    b = mean over the group of (q - (w - e) r);  beta = 1.01 beta
    shrink(x) = sign(x) relu(|x| - |x|^-0.3 / beta), beta = 10 at first
    stop when the mean of |w - v| over the matrix stops falling

then q again, s = 1 / r, z = (8 - b) s. The iterations run in float32 for a CPU and in float16 for CUDA.

`scale_only`, for symmetric integers (`IntxChooseQParamsAlgorithm.HQQ_SCALE_ONLY`), float32. From s = absmax / 2^(bits -
1), twenty times:

    q = clamp(rn(w / s));  s = sum(w q) / sum(q q), at least float32's eps
    stop when no scale of the matrix moves by more than 1e-5 of itself

Both stop for the whole matrix at once, so a row depends on its neighbours; and sums over a group are taken in the order
of the device, so codes made on a CPU and on a GPU may differ in a few last places. Prepare and convert on one device,
as torchao converts. Stopping is a mask over the iterations and no branch, so that nothing waits for a device and shapes
can be traced.
Source: torchao 0.18 `quant_primitives`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import layout
from .base import Encoded, Scales
from .integer import Affine
from .scales import absmax

# Values of which there are intermediates at once, three of 16 MB in float16. Fewer, and a GPU waits for Python.
TILE = 1 << 23
ITERATIONS = 20
BETA, GROWTH, POWER = 1e1, 1.01, 0.7 - 1
LARGEST_INVERSE = 2e4
WORST_ERROR = 1e4
TOLERANCE = 1e-5
EPS = torch.finfo(torch.float32).eps
NOT_HELD = "{}: HQQ fits scales and codes to each other, so its scales cannot be held apart: choose scales='dynamic'"


def affine(x_RGB: Tensor, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """For some rows r after others: q (r, G, group) in -8..7 as floats, scale and zero (r, G) in x's dtype; the
    iterations run in `dtype`.

    What is in between is there for some rows at a time too, but for |w - v|, whose mean is taken over the matrix in the
    device's order.
    """
    tiles = max(1, -(-x_RGB.numel() // TILE))
    rows = max(1, -(-len(x_RGB) // tiles))  # of one size, so that sums over a group are taken in one order
    inverse_RG, zero_RG = _start(x_RGB, dtype)
    if x_RGB.numel():
        _iterate([x.flatten(0, 1) for x in x_RGB.split(rows)], inverse_RG.view(-1, 1), zero_RG.view(-1, 1))
    for x, inverse, zero in zip(*(t.split(rows) for t in (x_RGB, inverse_RG, zero_RG)), strict=True):
        q = (x.float() * inverse.unsqueeze(-1)).add_(zero.unsqueeze(-1)).round_().clamp_(0, 15).sub_(8)
        scale = inverse.reciprocal()
        shift = ((8 - zero.float()) * scale.float()).to(dtype)
        yield q, scale.to(x.dtype), shift.to(x.dtype)


def _start(x_RGB: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """r and b of the extremes (R, G) in `dtype`."""
    if x_RGB.numel() == 0:
        zeros = x_RGB.new_zeros(x_RGB.shape[:2], dtype=dtype)
        return zeros, zeros
    low, high = x_RGB.amin(-1).float(), x_RGB.amax(-1).float()
    inverse = ((high - low).reciprocal() * 15).clamp(max=LARGEST_INVERSE)
    return inverse.to(dtype), (-low * inverse).round().to(dtype)


@torch.no_grad()
def _iterate(xs: Sequence[Tensor], inverse: Tensor, zero: Tensor) -> None:
    """Move `zero`, in its place. xs: groups (n, group) of rows after each other; inverse, zero: (all n, 1)."""
    sizes = [len(x) for x in xs]
    lost = inverse.new_empty(len(inverse), xs[0].shape[1])  # |w - v|
    beta, best = BETA, torch.full((), WORST_ERROR, dtype=inverse.dtype, device=inverse.device)
    running = torch.ones((), dtype=torch.bool, device=inverse.device)
    for _ in range(ITERATIONS):
        for x, r, b, magnitude in zip(xs, *(t.split(sizes) for t in (inverse, zero, lost)), strict=True):
            torch.where(running, _moved(x, r, b, magnitude, beta), b, out=b)
        beta *= GROWTH
        size = lost.mean()
        running = running & (size < best)
        best = size


def _moved(x: Tensor, r: Tensor, b: Tensor, magnitude: Tensor, beta: float) -> Tensor:
    """The next zero points of some rows, three intermediates at once. magnitude: where |w - v| goes."""
    w = x.to(r.dtype, copy=True)
    q = (w * r).add_(b).round_().clamp_(0, 15)
    error = (q - b).div_(r)
    torch.sub(w, error, out=error)
    torch.abs(error, out=magnitude)
    shrunk, w = _shrink(error, magnitude, beta, w), error.copy_(x)
    return q.sub_(torch.sub(w, shrunk, out=shrunk).mul_(r)).mean(1, keepdim=True)


def _shrink(x: Tensor, magnitude: Tensor, beta: float, out: Tensor) -> Tensor:
    """The proximal operator of the 0.7-norm, into `out`; of x its sign is left. magnitude: |x|."""
    less = torch.pow(magnitude, POWER, out=out).mul_(1.0 / beta)
    return torch.sub(magnitude, less, out=less).relu_().mul_(x.sign_())


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

    reach = "tensor"  # the solver stops for all rows at once
    from_extremes = False
    portable = False

    @property
    def name(self) -> str:
        return f"{super().name}-hqq"

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
        _, scale = scale_only(x_RGB, low, high)
        q = (x_RGB.float() / scale.unsqueeze(-1)).round()
        return ((q < low) | (q > high)).flatten(1)

    def floored(self, e: Encoded) -> Tensor:
        return e.scales.float() <= EPS
