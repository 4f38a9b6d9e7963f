"""High precision as a format: values that are not quantised, in a place that needs a format's name.

A layer whose activations alone are quantised still converts to something: a packed tensor that holds the weight as it
is and quantises its input. With this format the weight's slot of a recipe needs no exception anywhere: encoding copies,
decoding casts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Encoded, Format, Scales


@dataclass(frozen=True)
class HighPrecision(Format):
    """Values as they are, in their own dtype; no scale."""

    name = "high-precision"
    bits = 16
    lossless = True
    reach = "block"

    def measure(self, x_RK: Tensor) -> Scales:
        return Scales()

    def quantize(self, x_RK: Tensor, s: Scales) -> Encoded:
        return Encoded(x_RK.clone(memory_format=torch.contiguous_format), None, None, None, x_RK.shape[1])

    def operand(self, e: Encoded, dtype: torch.dtype) -> Tensor:
        return e.codes.to(dtype)

    def saturated(self, x_RK: Tensor, e: Encoded) -> Tensor:
        return torch.zeros_like(x_RK, dtype=torch.bool)

    def floored(self, e: Encoded) -> Tensor:
        return torch.zeros(1, 1, dtype=torch.bool, device=e.codes.device)
