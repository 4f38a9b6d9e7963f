"""Inputs that decide between grids: ties, scales at both ends, and blocks whose candidates err almost the same."""

from __future__ import annotations

import re

import torch
from support.golden_inputs import DATA
from torch import Tensor

BF16 = torch.bfloat16
EFFORTS = {None: 1, "sided": 2, "search": 3}
METRICS = {None: 0, "mae": 1, "absmax": 2}


def name_arguments(name: str) -> tuple[int, int, int, float, bool]:
    """(effort, metric, tile, c, alternating) as csrc/grids.cuh numbers them."""
    tile = 16 if name.endswith("-16x16") else 1
    if match := re.match(r"fouroversix(?:-(mae|absmax))?", name):
        return 0, METRICS[match[1]], tile, 0.25, False
    match = re.match(r"gridflip(?:-(sided|search))?(?:-c([\d.]+))?(-alternating)?", name)
    assert match, name
    return EFFORTS[match[1]], 0, tile, float(match[2] or 0.25), match[3] is not None


def inputs(dtype: torch.dtype, rows: int = 40) -> dict[str, Tensor]:
    """name -> (rows or more, 768 or fewer), on the CPU."""
    made = {kind: make(rows, 768, dtype) for kind, make in DATA.items()}
    generator = torch.Generator().manual_seed(11)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    bits = torch.arange(65536, dtype=torch.int32)
    every = torch.cat((bits, (bits * 40503 + 17) & 0xFFFF)).to(torch.int16).view(BF16).view(-1, 512)
    made["every"] = every.to(dtype)
    made["every-finite"] = torch.where(every.isfinite(), every, 1.0).to(dtype)
    made["spread"] = (
        normal(rows, 768) * 2.0 ** torch.randint(-140, 120, (rows, 48), generator=generator).repeat_interleave(16, 1)
    ).to(dtype)
    for power in (-130, -100, -61, -59, -45, -43, 59, 61, 100, 125):
        made[f"2^{power}"] = (normal(8, 768) * 2.0**power).to(dtype)
    made["ties"] = (torch.randint(-96, 97, (rows, 768), generator=generator) * 0.0625).to(dtype)
    made["few values"] = torch.tensor([-1.0, -0.5, 0.0, 0.25, 0.5, 1.0])[
        torch.randint(0, 6, (rows, 768), generator=generator)
    ].to(dtype)
    made["constant"] = torch.full((5, 768), -0.7, dtype=dtype)
    made["zeros"], made["minus-zeros"] = torch.zeros(3, 768, dtype=dtype), -torch.zeros(3, 768, dtype=dtype)
    made["one row"] = normal(1, 16).to(dtype)
    sparse = normal(rows, 768) * (torch.rand(rows, 768, generator=generator) < 0.05)
    made["sparse"] = sparse.to(dtype)
    made["positive"], made["negative"] = normal(rows, 768).abs().to(dtype), (-normal(rows, 768).abs()).to(dtype)
    made["1e-8 beside 448"] = (
        torch.where(torch.arange(768) % 32 < 16, 1e-8, 448.0).repeat(4, 1).mul(normal(4, 768)).to(dtype)
    )
    made["weights"] = (normal(25 * rows + 31, 768) * 0.02).to(dtype)
    return made
