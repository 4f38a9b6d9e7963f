"""Delayed scaling on two processes: each sees its own tokens, both hold the absolute maxima of all."""

from __future__ import annotations

import torch
from support.distributed_setup import WORLD, Ranks, check
from torch import Tensor, nn

from aoquant import HybridConfig, quantize_

STATE = ("amax_history", "amax_factor")


def model(c: Ranks) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(32, 16)).to(c.device)
    quantize_(made, HybridConfig.fwd_bwd("te-fp8-tensor", "te-fp8-tensor", amax_history=16))
    return made


def tokens(c: Ranks) -> tuple[Tensor, Tensor]:
    """x and dy; the largest of one are among the first tokens, of the other among the last."""
    generator = torch.Generator().manual_seed(1)
    x, g = torch.randn(8, 32, generator=generator), torch.randn(8, 16, generator=generator)
    x[:4] *= 3
    g[4:] *= 5
    return x.to(c.device), g.to(c.device)


@check()
def delayed_scales_are_those_of_all_ranks(c: Ranks) -> None:
    """Each rank trains on its half; the maxima of all tokens are taken by hand."""
    linear, (x, g) = model(c), tokens(c)
    whole = torch.stack([t.abs().max() for t in (x, linear[0].weight.detach(), g)])
    own = torch.stack(
        [t.abs().max() for t in (x.chunk(WORLD)[c.rank], linear[0].weight.detach(), g.chunk(WORLD)[c.rank])]
    )
    assert not torch.equal(own, whole), "each rank lacks the largest of one tensor"
    for i in range(2):
        linear(x.chunk(WORLD)[c.rank].clone().requires_grad_()).backward(g.chunk(WORLD)[c.rank])
        assert torch.equal(linear[0].amax_history[:, -1], whole), f"step {i}"
        assert torch.equal(linear[0].amax_factor, torch.full_like(whole, 448) / whole), f"step {i}"
    assert linear[0].amax_history.count_nonzero() == 6
