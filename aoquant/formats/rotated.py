"""A random rotation before an encoding: "rht32+mxfp4-sr" is a randomised Hadamard transform of every 32 values, then
mxfp4-sr.

The transform flips signs at random and then mixes, x diag(s) H / sqrt(size), so outliers spread over their block, and
no direction of the error is preferred. It is for the two operands of one GEMM: H is orthogonal, both operands are
rotated along the axis that the GEMM contracts, by the same signs, and in the product the rotation cancels. What
`decode` gives is therefore still rotated.

H is Sylvester's, by the butterflies of `transforms.Hadamard`, so every device makes the same bytes. Here the factor is
1 / sqrt(size) in float32, for both operands: there is no kernel to imitate whose entries are bf16, and a gain of 1.1e-4
would be a bias. Nothing is rounded between the rotation and the encoding.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import lcm

import torch
from torch import Tensor

from aoquant.transforms.base import SIZES
from aoquant.transforms.hadamard import butterflies

from .base import Encoded, Format, Scales
from .random import Random
from .stochastic import Randomized


@dataclass(frozen=True)
class Rotated(Randomized):
    """`inner` after a randomised Hadamard transform of every `size` values along K."""

    size: int
    inner: Format

    @property
    def name(self) -> str:
        return f"rht{self.size}+{self.inner.name}"

    @property
    def bits(self) -> int:
        return self.inner.bits

    @property
    def block(self) -> int | None:
        return self.inner.block

    @property
    def period(self) -> int:
        return lcm(self.size, self.inner.period)

    def encode(self, x_RK: Tensor, held: Scales | None = None, random: Random | None = None) -> Encoded:
        if random is None:
            return super().encode(x_RK, held, random)  # raises
        rotated = rotate(x_RK, random.signs(self.size))
        return (
            self.inner.encode(rotated, held, random)
            if isinstance(self.inner, Randomized)
            else self.inner.encode(rotated)
        )

    def operand(self, e: Encoded, dtype: torch.dtype) -> Tensor:
        return self.inner.operand(e, dtype)

    def alpha(self, e: Encoded) -> Tensor | None:
        return self.inner.alpha(e)

    def decode(self, e: Encoded, dtype: torch.dtype) -> Tensor:
        return self.inner.decode(e, dtype)


def rotate(x_RK: Tensor, signs: Tensor) -> Tensor:
    """(R, K) float32: x diag(signs) H / sqrt(len(signs)), in groups of as many values along K."""
    size = len(signs)
    signed = (x_RK.float().reshape(-1, size) * signs).view(x_RK.shape)
    return butterflies(signed, size) * size**-0.5


def parse(name: str) -> tuple[int, str] | None:
    """(size, name of the inner format) of a rotated format's name."""
    match = re.fullmatch(r"rht(\d+)\+(.+)", name)
    if match is None:
        return None
    if int(match[1]) not in SIZES:
        raise ValueError(
            f"{name!r}: a random rotation has one of the sizes {', '.join(map(str, SIZES))}, got {match[1]}"
        )
    return int(match[1]), match[2]
