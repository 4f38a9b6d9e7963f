"""Converted layers on a GPU: their plan multiplies as the general path does, to the bit, for every range of rows."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from support.gpu import captured
from torch import Tensor, nn
from torch.nn import functional as F

from aoquant import QATConfig, quantize_
from aoquant.linear.packed import PackedLinear
from aoquant.recipes import get_recipe

pytestmark = pytest.mark.gpu

RECIPES = ["int4-g128", "nvfp4-weight", "mxfp4-weight", "nvfp4", "mxfp4", "fp8", "int8"]
ROWS = (1, 4, 5, 8, 9, 16, 17, 64, 65, 256, 257, 1024, 4096)
N, K = 512, 1024
recipes = pytest.mark.parametrize("name", RECIPES)


def prepared(name: str, bias: bool = True, dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(K, N, bias=bias, device="cuda", dtype=dtype)).requires_grad_(False)
    quantize_(model, QATConfig(get_recipe(name).make(), step="prepare"))
    return model.eval()


def converted(model: nn.Sequential, name: str) -> PackedLinear:
    served = copy.deepcopy(model)
    quantize_(served, QATConfig(get_recipe(name).make(), step="convert"))
    assert type(served[0]) is PackedLinear
    return served[0]


def batch(rows: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    torch.manual_seed(rows)
    return torch.randn(rows, K, device="cuda").to(dtype)


@recipes
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "f16", "f32"])
def test_every_range_of_rows_equals_the_general_path(name: str, bias: bool, dtype: torch.dtype) -> None:
    qat = prepared(name, bias, dtype)
    module = converted(qat, name)
    for rows in ROWS:
        for x in (batch(rows, dtype), batch(2 * rows, dtype)[::2], batch(rows, dtype).view(1, rows, K)):
            want = F.linear(x, module.weight, module.bias)  # under gradients nothing is remembered
            with torch.no_grad():
                for _ in range(2):
                    assert torch.equal(module(x), want), (rows, tuple(x.shape))
                assert torch.equal(qat(x), want), (rows, tuple(x.shape))
                onehot = torch.eye(K, device="cuda", dtype=dtype)[torch.arange(rows) * 7 % K]
                assert torch.equal(module(onehot), F.linear(onehot, module.weight, module.bias))


@recipes
@pytest.mark.parametrize("rows", [1, 16, 64, 300])
def test_captured_and_compiled_equal_eager(name: str, rows: int) -> None:
    module, x = converted(prepared(name), name), batch(rows)
    with torch.no_grad():
        want = module(x)
        graph, y = captured(lambda: module(x))
        y.zero_()
        graph.replay()
        assert torch.equal(y, want)
        torch._dynamo.reset()
        run = torch.compile(module, mode="reduce-overhead", fullgraph=True)
        for _ in range(3):
            assert torch.equal(run(x), want)
        module.weight.qdata.zero_()  # in place: graphs read the weight where it lies
        changed = run(x).clone()
        graph.replay()
        assert torch.equal(changed, module(x)) and torch.equal(y, module(x))
    torch._dynamo.reset()


@recipes
@pytest.mark.parametrize("rows", [1, 4, 16, 64, 256, 300])
def test_odd_biases_and_shapes_equal_the_plain_ones(name: str, rows: int) -> None:
    """A strided bias and a single value for all, and x of nine dimensions, eager and compiled."""
    module, x = converted(prepared(name), name), batch(rows)
    values = torch.randn(2 * N, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        for odd in (values[::2], values[:1]):
            module.bias = nn.Parameter(odd.expand(N).contiguous(), requires_grad=False)
            want = module(x)
            assert torch.equal(module(x.view(*[1] * 7, rows, K)), want.view(*[1] * 7, rows, N))
            module.bias = nn.Parameter(odd, requires_grad=False)
            torch._dynamo.reset()
            compiled = torch.compile(module, fullgraph=True)
            for run in (module, compiled):
                assert torch.equal(run(x), want)
                assert torch.equal(run(x.view(*[1] * 7, rows, K)), want.view(*[1] * 7, rows, N))
    torch._dynamo.reset()


def test_threads_and_streams_give_the_numbers_of_one() -> None:
    module = converted(prepared("nvfp4"), "nvfp4")
    xs = [batch(rows) for rows in (1, 5, 17, 300)]
    with torch.no_grad():
        want = [module(x) for x in xs]
    torch.cuda.synchronize()
    wrong: list[int] = []

    def run() -> None:
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                wrong.extend(i for i, x in enumerate(xs) if not torch.equal(module(x), want[i]))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
