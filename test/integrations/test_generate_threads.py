"""Two threads that generate from one model get the tokens that one thread gets, on the CPU and on a GPU.

What threads share is a packed weight's bound kernels, made at first use, and the encoding of an input that several
layers read: test_shared_inputs.py looks at the latter by itself.
"""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from support.models import llama
from torch import Tensor

from aoquant import quantize_
from aoquant.recipes import get_recipe

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NEW = 6


def prompts(device: str) -> list[Tensor]:
    """Of two batch sizes and lengths, so that each thread asks for kernels of other numbers of rows."""
    torch.manual_seed(1)
    return [torch.randint(0, 128, shape).to(device) for shape in ((1, 5), (3, 9))]


def tokens(model: Any, ids: Tensor) -> Tensor:
    made: Tensor = model.generate(ids, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0)
    return made


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "recipe", ["nvfp4", "int8-int4", *(pytest.param(r, marks=pytest.mark.slow) for r in ("int4-g32", "fp8"))]
)
def test_two_threads_get_the_tokens_of_one(recipe: str, device: str) -> None:
    torch.manual_seed(0)
    model = llama().to(device).requires_grad_(False)
    quantize_(model, get_recipe(recipe).make())
    given = prompts(device)
    want = [tokens(copy.deepcopy(model), ids) for ids in given]  # `model` itself has not run when the threads start
    found: dict[int, list[Tensor]] = {}
    start = threading.Barrier(2)

    def run(which: int) -> None:
        order = given if which else given[::-1]
        start.wait()
        made = [tokens(model, ids) for _ in range(2) for ids in order]
        found[which] = made if which else [made[i ^ 1] for i in range(4)]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found.keys() == {0, 1}
    for made in found.values():
        for i, ids in enumerate(made):
            assert torch.equal(ids, want[i % 2])
