"""Delayed scaling on two processes: each sees its own tokens, both hold the absolute maxima of all."""

from __future__ import annotations

import os

import pytest
import torch
from support.two_ranks import on_two_ranks
from torch import Tensor, distributed, multiprocessing, nn

from aoquant import HybridConfig, quantize_

STATE = ("amax_history", "amax_factor")


def model() -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(32, 16))
    quantize_(made, HybridConfig.fwd_bwd("te-fp8-tensor", "te-fp8-tensor", amax_history=16))
    return made


def batch() -> tuple[Tensor, Tensor]:
    """x and dy; the largest of one are among the first tokens, of the other among the last."""
    generator = torch.Generator().manual_seed(1)
    x, g = torch.randn(8, 32, generator=generator), torch.randn(8, 16, generator=generator)
    x[:4] *= 3
    g[4:] *= 5
    return x, g


def trained(qat: nn.Sequential, tokens: slice) -> dict[str, list[float]]:
    x, g = batch()
    for _ in range(2):
        qat(x[tokens].clone().requires_grad_()).backward(g[tokens])
    return {name: getattr(qat[0], name).tolist() for name in STATE}


def worker(rank: int, port: int, queue: multiprocessing.SimpleQueue) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", rank=rank, world_size=2)
    try:
        queue.put(trained(model(), slice(4 * rank, 4 * rank + 4)))
    finally:
        distributed.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_hold_the_maxima_of_both() -> None:
    found = on_two_ranks(worker)
    assert found[0] == found[1] == trained(model(), slice(0, 8))
