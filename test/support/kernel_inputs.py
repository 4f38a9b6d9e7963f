"""Inputs that show what a kernel does with every kind of number, and a comparison of what it made, bit by bit."""

from __future__ import annotations

import torch
from torch import Tensor

from aoquant.formats import Encoded

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


def differing(a: Tensor | None, b: Tensor | None) -> int:
    """Elements whose bits differ, NaN of any payload taken as one."""
    assert (a is None) == (b is None)
    if a is None or b is None:
        return 0
    assert a.shape == b.shape and a.dtype == b.dtype and a.is_contiguous()
    a, b = a.cpu(), b.cpu()
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    unequal = a.view(integer) != b.contiguous().view(integer)
    if a.is_floating_point():
        unequal &= ~(a.float().isnan() & b.float().isnan())
    return int(unequal.sum())


def compare(got: Encoded, want: Encoded, what: str) -> None:
    for part, a, b in zip(("codes", "scale", "zero", "outer"), got, want, strict=False):
        n = differing(a, b)
        assert n == 0, f"{what}: {n} of {a.numel() if a is not None else 0} {part} differ"
