"""Dense Hadamard matrices, the oracle of the tests of transforms."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from aoquant import Hadamard

SIZES = (16, 32, 64, 128)
MASKS = {16: 0xA5C3, 32: 0x9E3779B9, 64: 0x9E3779B97F4A7C15, 128: (1 << 127) | 0xBEEF}


def sylvester(size: int) -> Tensor:
    """H by its recursion, float64."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < size:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return h


def dense(t: Hadamard) -> Tensor:
    """T = h H diag(s), of bf16 numbers, in float64."""
    h = torch.tensor(1 / math.sqrt(t.size), dtype=torch.bfloat16).double()
    signs = torch.tensor([-1.0 if t.signs >> i & 1 else 1.0 for i in range(t.size)], dtype=torch.float64)
    return h * sylvester(t.size) * signs


def blocks(x: Tensor, matrix: Tensor) -> Tensor:
    """Blocks of x times `matrix`, in float64."""
    return (x.double().reshape(-1, matrix.shape[0]) @ matrix).view(x.shape)
