"""What a fine-tune of this library does at a step: which blocks of text it reads, and how fast it learns.

Both are functions of the arguments alone, for the whole batch. So a run that stops and goes on, or that goes on with
another number of ranks, reads the same text at the same rates.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def order_of_blocks(blocks: int, steps: int, batch: int, seed: int) -> Tensor:
    """Indices (steps, batch), int64, of the blocks of a run: every block once before any comes again."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    wanted = steps * batch
    rounds = [torch.randperm(blocks, generator=generator, device="cpu") for _ in range(-(-wanted // blocks))]
    return torch.cat(rounds)[:wanted].view(steps, batch)


def rate_at(peak: float, step: int, steps: int) -> float:
    """Learning rate of a step (0-based): a warm-up of a twentieth, then half a cosine to zero."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))
