"""Inputs that show what a kernel does with every kind of number."""

from __future__ import annotations

import torch
from torch import Tensor

from .golden_inputs import DATA

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
CUDA = torch.device("cuda")


def every_bf16() -> Tensor:
    """All 65536 values, neighbours in a block: sorted by bits, then dealt so that blocks mix magnitudes and signs."""
    bits = torch.arange(65536, dtype=torch.int32)
    dealt = (bits * 40503 + 17) & 0xFFFF
    narrow = torch.cat((bits, dealt)).to(torch.int16).view(BF16)
    return narrow.view(-1, 512)


def inputs(dtype: torch.dtype) -> dict[str, Tensor]:
    """name -> (rows, 768) or narrower, on the CPU; 768 is a multiple of every block but 512's."""
    made = {kind: make(40, 768, dtype) for kind, make in DATA.items()}
    made["every"] = every_bf16().to(dtype)[:, :480].contiguous().view(-1, 96).repeat(1, 8)
    finite = made["every"].clone()
    finite[~finite.isfinite()] = 1.0
    made["every-finite"] = finite
    generator = torch.Generator().manual_seed(5)
    spread = torch.randn(64, 768, generator=generator) * 2.0 ** torch.randint(-140, 120, (64, 1), generator=generator)
    made["exponents"] = spread.to(dtype)
    made["ties"] = (torch.randint(-60, 61, (64, 768), generator=generator) * 0.125).to(dtype)
    made["zeros"], made["minus-zeros"] = torch.zeros(3, 768, dtype=dtype), -torch.zeros(3, 768, dtype=dtype)
    made["large"] = (torch.randn(1031, 768, generator=generator) * 0.02).to(dtype)
    return made
