"""Compiled steps on a GPU: the kernels of eager ones, as many, and the same bits; with and without CUDA graphs."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from aoquant import QATConfig, quantize_
from aoquant.recipes import get_recipe

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_dynamo")]
BF16, CUDA = torch.bfloat16, torch.device("cuda")
RECIPES = ["nvfp4", "nvfp4-h16", "mxfp4", "mxfp8", "int8-int4", "int4-g128", "torchao-fp8", "gridflip"]


def layer(recipe: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(1024, 2048, bias=False, dtype=BF16, device=CUDA))
    quantize_(model, QATConfig(get_recipe(recipe).make()))
    return model


def step(run: Any, model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    y = run(leaf)
    y.backward(torch.linspace(-1, 1, y.numel(), device=CUDA).to(y.dtype).view_as(y))
    assert leaf.grad is not None
    return [t.clone() for t in (y.detach(), leaf.grad, *(p.grad for p in model.parameters() if p.grad is not None))]


def kernels(run: Any, model: nn.Module, x: Tensor) -> Counter[str]:
    """Names of the kernels of a step, without the memory that cuBLAS clears: its GEMM may differ in each mode."""
    for _ in range(3):
        step(run, model, x)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step(run, model, x)
        torch.cuda.synchronize()
    names = [e.name for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    gemm = re.compile("nvjet|gemm|cutlass|cublas")
    return Counter("GEMM" if gemm.search(n) else n for n in names if not n.startswith("Memset"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_compiled_step_launches_what_an_eager_one_does(recipe: str) -> None:
    """Not a copy, not a pass over a tensor more: what is left of a difference in time is the host's."""
    model, x = layer(recipe), torch.randn(4096, 1024, device=CUDA, dtype=BF16)
    compiled = torch.compile(model, fullgraph=True)
    for got, want in zip(step(compiled, model, x), step(model, model, x), strict=True):
        assert torch.equal(got, want)
    eager = kernels(model, model, x)
    assert eager and kernels(compiled, model, x) == eager


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_compiled_step_can_be_a_cuda_graph(recipe: str) -> None:
    """mode="reduce-overhead" records the ops' kernels and replays them on other inputs."""
    model = layer(recipe)
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    for i in range(5):  # warm up, record, replay
        torch.compiler.cudagraph_mark_step_begin()
        x = torch.randn(512, 1024, device=CUDA, dtype=BF16, generator=torch.Generator(CUDA).manual_seed(i))
        got = step(compiled, model, x)
        for a, b in zip(got, step(model, model, x), strict=True):
            assert torch.equal(a, b), f"call {i}"
