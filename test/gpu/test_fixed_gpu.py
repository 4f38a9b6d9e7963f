"""A model in training that generates inside `fixed_weights`: the kernels of the converted layer, with the prepared
layer's bits.
"""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from support.gpu import captured
from torch import Tensor, nn

from aoquant import QATConfig, explain, fixed_weights, quantize_
from aoquant.ops import native
from aoquant.recipes import get_recipe

pytestmark = pytest.mark.gpu

RECIPES = ["int4-g128", "nvfp4-weight", "mxfp4-weight", "nvfp4", "fp8"]  # csrc's operator has them
OTHERS = ["fp8-scaled-mm", "fp8-hybrid", "mxfp4", "mxfp4-h32", "int8", "int8-int4", "gridflip-search"]
N, K = 512, 1024


def prepared(name: str) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(K, N, device="cuda", dtype=torch.bfloat16))
    quantize_(model, get_recipe(name).prepare())
    return model


def rows(m: int) -> Tensor:
    torch.manual_seed(m)
    return torch.randn(m, K, device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize("name", [*RECIPES, *OTHERS])
@torch.no_grad()
def test_bits_are_those_outside_and_of_the_converted_layer(name: str) -> None:
    model = prepared(name)
    converted = copy.deepcopy(model)
    quantize_(converted, QATConfig(step="convert"))
    given = {m: rows(m) for m in (1, 3, 8, 16, 17, 64, 256, 300)}
    want = {m: model(x) for m, x in given.items()}
    with fixed_weights(model):
        for _ in range(2):
            for m, x in given.items():
                assert torch.equal(model(x), want[m]), m
                assert torch.equal(converted(x), want[m]), m


@pytest.mark.parametrize("name", [*RECIPES, *OTHERS])
def test_explain_names_the_kernels_of_the_converted_layer(name: str) -> None:
    """All but what encodes the input, whose codes a prepared layer may keep for backward."""
    model = prepared(name)
    converted = copy.deepcopy(model)
    quantize_(converted, QATConfig(step="convert"))
    with fixed_weights(model):
        inside = explain(model[0])
    assert "its weight is fixed" in inside.layer and "encode the weight" not in {r.step for r in inside.routes}
    of_weight = [[r for r in found.routes if "input" not in r.step] for found in (inside, explain(converted[0]))]
    assert of_weight[0] == of_weight[1] != []


@pytest.mark.parametrize("name", RECIPES)
@torch.no_grad()
def test_few_rows_take_the_bound_kernel(name: str) -> None:
    if (reason := native.why_not()) is not None:
        pytest.skip(reason)
    model, x = prepared(name), rows(1)
    want = model(x)
    with (
        fixed_weights(model),
        mock.patch("aoquant.linear.function.multiply", side_effect=AssertionError("the general path")),
        mock.patch("aoquant.linear.bound.multiply", side_effect=AssertionError("the general path")),
    ):
        for _ in range(2):
            assert torch.equal(model(x), want)


@pytest.mark.parametrize("name", RECIPES)
@torch.no_grad()
def test_a_graph_is_captured_and_replayed(name: str) -> None:
    model, x = prepared(name), rows(1)
    want = model(rows(2)[:1])
    with fixed_weights(model):
        graph, y = captured(lambda: model(x))
        x.copy_(rows(2)[:1])
        graph.replay()
        assert torch.equal(y, want)


@torch.no_grad()
def test_the_block_frees_the_codes() -> None:
    model, x = prepared("nvfp4"), rows(1)
    model(x)
    with fixed_weights(model):
        model(x)  # what kernels allocate once
    before = torch.cuda.memory_allocated()
    with fixed_weights(model):
        model(x)
        assert torch.cuda.memory_allocated() >= before + N * K // 2
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("name", ["int4-g128", "nvfp4", "fp8"])
@torch.no_grad()
def test_compiled(name: str) -> None:
    model, x = prepared(name), rows(1)
    want = model(x)
    compiled = torch.compile(model, fullgraph=True)
    with fixed_weights(model):
        for run in (compiled, model, compiled):
            assert torch.equal(run(x), want)
