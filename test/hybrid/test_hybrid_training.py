"""Steps of training with one cast for each operand. What any training does (resume, checkpoints, compilation) is in
test_ways_to_train.py.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.training_cases import assert_same, batch, step, student
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager

from aoquant.recipes import get_recipe

MIXES = ("mxfp8-nvfp4", "fp8-hybrid", "nvfp4-training", "te-nvfp4-sr")


@pytest.mark.parametrize("name", MIXES)
def test_a_step_makes_no_tensor_of_python_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each would be a copy that waits for the device, and that no CUDA graph can capture."""
    model = student(get_recipe(name).prepare())

    def refused(*args: Any, **options: Any) -> Tensor:
        raise AssertionError("a tensor of Python numbers")

    x = batch()[0].requires_grad_()
    with monkeypatch.context() as patched:
        for function in ("tensor", "as_tensor", "from_numpy"):
            patched.setattr(torch, function, refused)
        model(x).square().sum().backward()


@pytest.mark.parametrize(
    "name", ["fp8-hybrid", *(pytest.param(n, marks=pytest.mark.slow) for n in ("mxfp8-nvfp4", "nvfp4-training"))]
)
def test_compiled_with_dynamic_tokens(name: str) -> None:
    torch._dynamo.reset()
    model = student(get_recipe(name).prepare(seed=3))
    again, compiled = copy.deepcopy(model), []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(1)
        return aot_eager(graph, inputs)

    run = torch.compile(model, backend=backend, fullgraph=True)
    for rows in (300, 270, 33, 17, 320):  # `formats.scales.absmax` reads 16384 values and more in another way
        x, g = batch(rows, seed=rows)
        assert_same(step(model, x, g, run), step(again, x, g))
    assert len(compiled) <= 2, "the second number of tokens makes it dynamic, the third changes nothing"
