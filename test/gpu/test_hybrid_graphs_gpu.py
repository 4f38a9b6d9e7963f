"""Hybrid training steps as CUDA graphs: what `torch.compile(mode="reduce-overhead")` records and replays is the eager
step, bit for bit, with random numbers and delayed scales that move on inside the graph.

python -m pytest -m gpu test/gpu/test_hybrid_graphs_gpu.py
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from aoquant import HybridConfig, QATConfig, quantize_
from aoquant.linear.prepared import DELAYED_STATE, RANDOM
from aoquant.recipes import get_recipe

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_dynamo")]
BF16, CUDA = torch.bfloat16, torch.device("cuda")
STEPS = 5  # the first runs as it is, the second is recorded, the others are replayed
MIXES = ("mxfp8-nvfp4", "nvfp4-mxfp8", "fp8-hybrid", "nvfp4-training", "mxfp8-hp", "nvfp4-hp")
TE, E5M2 = "te-fp8-tensor", "te-fp8-e5m2-tensor"
CASTS = {"dgrad_weight": TE, "wgrad_input": TE, "dgrad_grad_output": E5M2, "wgrad_grad_output": E5M2}
CONFIGS = {name: get_recipe(name).prepare() for name in MIXES} | {
    f"delayed {select}": QATConfig("fp8-hybrid", backward=HybridConfig(**CASTS, amax_history=4, amax_select=select))
    for select in ("max", "most_recent")
}


def model(config: Any) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512)).to(CUDA, BF16)
    quantize_(layers, config)
    return layers


def step(run: Any, layers: nn.Module, x: Tensor, g: Tensor) -> list[Tensor]:
    """A step of SGD: y, dx, the gradients, the states of random numbers and of delayed scales."""
    torch.compiler.cudagraph_mark_step_begin()
    layers.zero_grad()
    leaf = x.clone().requires_grad_()
    y = run(leaf)
    y.backward(g)
    assert leaf.grad is not None
    found = [y.detach().clone(), leaf.grad.clone()]
    with torch.no_grad():
        for p in layers.parameters():
            assert p.grad is not None
            found.append(p.grad.clone())
            p.add_(p.grad, alpha=-1e-3)
    states = {name: b.clone() for name, b in layers.named_buffers() if name.endswith((RANDOM, *DELAYED_STATE))}
    return [*found, *states.values()]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_replayed_step_is_the_eager_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    eager = model(CONFIGS[name])
    layers = copy.deepcopy(eager)
    compiled = torch.compile(layers, fullgraph=True, mode="reduce-overhead")
    replays, real = 0, torch.cuda.CUDAGraph.replay

    def counted(graph: Any) -> None:
        nonlocal replays
        replays += 1
        real(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted)
    for i in range(STEPS):
        generator = torch.Generator(CUDA).manual_seed(i)
        x, g = (torch.randn(256, 512, device=CUDA, dtype=BF16, generator=generator) for _ in range(2))
        got, want = step(compiled, layers, x, g), step(eager, eager, x, g)
        for at, (a, b) in enumerate(zip(got, want, strict=True)):
            assert torch.equal(a, b), f"step {i}, tensor {at}"
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert replays >= 2 * (STEPS - 2), "forward and backward"


@pytest.mark.parametrize("name", ["nvfp4-training", "delayed max"])
def test_states_move_inside_the_graph(name: str) -> None:
    """Else the comparison above would be of steps that all draw the same, or scale the same."""
    layers = model(CONFIGS[name])
    compiled = torch.compile(layers, fullgraph=True, mode="reduce-overhead")
    seen = []
    for i in range(STEPS):
        x, g = (torch.randn(256, 512, device=CUDA, dtype=BF16) * (i + 1) for _ in range(2))
        step(compiled, layers, x, g)
        seen.append([b.clone() for n, b in layers.named_buffers() if n.endswith((RANDOM, "amax_history"))])
    for before, after in itertools.pairwise(seen):
        assert all(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    if name == "nvfp4-training":
        assert all(int(state[2]) == STEPS for state in seen[-1])
