"""A format behind a transform: what is quantised is x T^T for an activation, W T^-1 for a weight.

The name says it, "hadamard16+nvfp4", and names are what crosses the boundaries of ops, so everything that knows formats
by name (encoding, both backward GEMMs, masks, packing, checkpoints) works in the transformed domain without knowing
that it does. Nothing but codes is stored or saved for backward.

`encode` quantises the float32 result of the transform, never rounded to x's dtype in between, and scales are found on
that result. Formats that store scales in their input's dtype store float32 then. Values in high precision are the
exception, they ARE the layer's dtype: "hadamard16+high-precision" is the activation of a weight-only layer, rounded
once.

Codes, `operand`, `decode` and `saturated` are of the transformed domain. The way back is `pull_back`, for gradients of
this side; and for the other side's values, because W = (W T^-1) T.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import lcm

import torch
from torch import Tensor

from aoquant.transforms import Transform, parse

from .base import Encoded, Format, Scales
from .high import HighPrecision


@dataclass(frozen=True)
class Transformed(Format):
    """`inner`, of transformed values. inverse: the weight side; always False where the two sides are alike."""

    inner: Format
    transform: Transform
    inverse: bool = False

    def __post_init__(self) -> None:
        assert not isinstance(self.inner, Transformed)
        object.__setattr__(self, "inverse", self.inverse and self.transform.sided)

    @staticmethod
    def named(name: str) -> bool:
        """Whether a format's name is that of one behind a transform; a static scale may hold a plus too."""
        return "+" in name.partition("-static:")[0]

    @staticmethod
    def split(name: str) -> tuple[Transform, bool, str] | None:
        """(transform, weight side, name of the inner format) of a transformed format's name; None when it is no such
        name.
        """
        prefix, plus, inner = name.partition("+")
        found = parse(prefix) if plus else None
        return None if found is None else (*found, inner)

    @property
    def name(self) -> str:
        return f"{self.transform.name}{'-inverse' if self.inverse else ''}+{self.inner.name}"

    @property
    def bits(self) -> int:
        return self.inner.bits

    @property
    def block(self) -> int:
        """Values along K that cannot be encoded apart: of a scale's block or of a transform's, whichever is longer."""
        return max(self.inner.block or 1, self.transform.size)

    @property
    def tile_rows(self) -> int:
        return self.inner.tile_rows

    @property
    def per_tensor(self) -> bool:
        return self.inner.per_tensor

    @property
    def reach(self) -> str:
        return self.inner.reach

    @property
    def from_extremes(self) -> bool:
        return self.inner.from_extremes

    @property
    def finite_only(self) -> bool:
        return self.inner.finite_only

    @property
    def period(self) -> int:
        return lcm(self.inner.period, self.transform.size)

    @property
    def portable(self) -> bool:
        return self.inner.portable and not self.fitted

    @cached_property
    def by_rows(self) -> bool:
        return self.inner.by_rows

    @property
    def base(self) -> Format:
        return self.inner

    @property
    def fitted(self) -> bool:
        return self.transform.fitted

    def transformed(self, x_RK: Tensor, matrix: Tensor | None = None) -> Tensor:
        y_RK = self.transform.apply(x_RK, self.inverse, matrix)
        return y_RK.to(x_RK.dtype) if isinstance(self.inner, HighPrecision) else y_RK

    def pull_back(self, grad_RK: Tensor, matrix: Tensor | None = None) -> Tensor:
        return self.transform.pull_back(grad_RK, self.inverse, matrix).to(grad_RK.dtype)

    def encode(self, x_RK: Tensor, held: Scales | None = None) -> Encoded:
        y_RK = self.transformed(x_RK, None if held is None else held.transform)
        return self.inner.encode(y_RK, None if held is None or held.dynamic else held._replace(transform=None))

    def measure(self, x_RK: Tensor) -> Scales:
        return self.inner.measure(self.transformed(x_RK))

    def quantize(self, x_RK: Tensor, s: Scales) -> Encoded:
        return self.inner.quantize(self.transformed(x_RK, s.transform), s)

    def hold(self, x_RK: Tensor, s: Scales) -> Encoded:
        return self.inner.hold(self.transformed(x_RK, s.transform), s)

    def fix(self, *numbers: float) -> Format:
        return Transformed(self.inner.fix(*numbers), self.transform, self.inverse)

    def operand(self, e: Encoded, dtype: torch.dtype) -> Tensor:
        return self.inner.operand(e, dtype)

    def alpha(self, e: Encoded) -> Tensor | None:
        return self.inner.alpha(e)

    def decode(self, e: Encoded, dtype: torch.dtype) -> Tensor:
        return self.inner.decode(e, dtype)

    def fake_quantize(self, x_RK: Tensor) -> Tensor:
        values = self.inner.decode(self.encode(x_RK), torch.float32)
        return self.transform.pull_back(values, self.transform.sided and not self.inverse, None).to(x_RK.dtype)

    def saturated(self, x_RK: Tensor, e: Encoded) -> Tensor:
        return self.inner.saturated(self.transformed(x_RK), e)

    def floored(self, e: Encoded) -> Tensor:
        return self.inner.floored(e)

    def planned(self, w_RK: Tensor) -> Encoded:
        return self.inner.encode(w_RK if isinstance(self.inner, HighPrecision) else w_RK.float())

    def bits_per_weight(self, rows: int, k: int) -> float:
        matrices = 16 * self.transform.size / rows if self.fitted else 0.0  # T in bf16, for each of rows * k values
        return super().bits_per_weight(rows, k) + matrices

    def why_not(self, k: int, dtype: torch.dtype) -> str | None:
        group, size = self.inner.block or 1, self.transform.size
        if max(group, size) % min(group, size):
            return f"{self.name}: blocks of {group} and a transform of {size} do not fit: one must divide the other"
        if k % size:
            return f"{self.transform.name} needs K to be a multiple of {size}, got K = {k}: choose a size that divides K or leave the layer out"
        return self.inner.why_not(k, dtype)
