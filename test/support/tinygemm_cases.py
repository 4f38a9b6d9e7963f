"""A call of tinygemm's CPU operator whose outputs show how its operand was rounded; a subprocess with other
instructions makes it too.
"""

from __future__ import annotations

import torch
from support.gemm import scaled_mm
from torch import Tensor

from aoquant import backend
from aoquant.formats import Encoded, TinyGemm, layout


def cpu_case(
    dtype: torch.dtype, m: int = 5, n: int = 80, k: int = 128, size: float = 2.0**-20
) -> tuple[Tensor, Encoded, TinyGemm]:
    """Inputs whose outputs show a rounding of the operand: groups of nearly equal values, multiplied by 1 and -1. size:
    of scales.
    """
    fmt = TinyGemm(32, device="cpu")
    g = torch.Generator().manual_seed(7)
    codes = torch.randint(0, 16, (n, k), generator=g, dtype=torch.uint8)
    scale = ((1 + torch.rand(n, k // 32, generator=g)) * size).to(dtype)
    scale[:, 1::2] = 0
    zero = (1 + torch.rand(n, k // 32, generator=g)).to(dtype)
    zero[:, 1], zero[:, 3] = zero[:, 0], zero[:, 2]
    x = torch.randn(m, k, generator=g).to(dtype)
    x[:2] = 0
    x[0, 3], x[0, 40] = 1, -1  # one value of a group less one of another, with nearly the same zero point
    x[1, 70], x[1, 100] = -1, 1
    return x, Encoded(layout.pack(codes ^ 8, 4), scale, zero, None, k), fmt


def linear(backend_name: str, x: Tensor, e: Encoded, fmt: TinyGemm, bias: Tensor | None = None) -> Tensor:
    with backend(backend_name):
        return scaled_mm(x, e, bias, "", fmt.name, "tinygemm_cpu", list(x.shape[:-1]), x.dtype)
