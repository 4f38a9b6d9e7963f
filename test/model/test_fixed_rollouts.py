"""Rollouts from a model in training: inside `fixed_weights` generate has the tokens of the prepared and of the
converted model, eager and compiled, and encodes no weight after its first token.
"""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from support.models import IDS, logits, narrow_llama
from torch import Tensor
from transformers import LlamaForCausalLM

import aoquant
from aoquant import QATConfig, fixed_weights, quantize_
from aoquant.recipes import get_recipe

RECIPES = ("int4-g32", "nvfp4", "fp8-hybrid", "int8-static")
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def model(recipe: str) -> LlamaForCausalLM:
    made = narrow_llama()
    quantize_(made, get_recipe(recipe).prepare())
    if recipe == "int8-static":
        aoquant.calibrate(made, lambda m: m(IDS))
    return made


def tokens(of: LlamaForCausalLM, **options: Any) -> Tensor:
    ids: Tensor = of.generate(IDS, max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0, **options)
    return ids


@pytest.mark.parametrize("recipe", RECIPES)
def test_tokens_and_logits(recipe: str) -> None:
    prepared = model(recipe)
    converted = copy.deepcopy(prepared)
    quantize_(converted, QATConfig(step="convert"))
    want, static = (tokens(converted), logits(converted)), {"cache_implementation": "static"}
    assert torch.equal(tokens(prepared), want[0])
    with fixed_weights(prepared):
        for mode in (prepared.eval(), prepared.train()):
            assert torch.equal(tokens(mode), want[0]) and torch.equal(logits(mode), want[1])
        # attention over a static cache sums in another order, in bf16 models too: its tokens may be others
        assert torch.equal(tokens(prepared, **static), tokens(converted, **static))


@pytest.mark.parametrize(
    ("recipe", "first"),
    [
        pytest.param(recipe, first, marks=[] if (i, j) == (0, 1) else [pytest.mark.slow])
        for i, recipe in enumerate(RECIPES)
        for j, first in enumerate(("eager", "compiled"))
    ],
)
@torch.no_grad()
def test_compiled(recipe: str, first: str) -> None:
    """It encodes as usual, so it sees a weight that is written."""
    prepared = model(recipe)
    want = logits(prepared)
    compiled = torch.compile(prepared, backend="aot_eager", fullgraph=True)
    with fixed_weights(prepared):
        for run in (prepared, compiled) if first == "eager" else (compiled, prepared):
            assert torch.equal(logits(run), want)
        prepared.model.layers[0].mlp.up_proj.weight.mul_(2)
        written = logits(compiled)
    assert torch.equal(written, logits(prepared)) and not torch.equal(written, want)


def test_threads() -> None:
    prepared = model("nvfp4")
    want, found = tokens(prepared), list[Tensor]()
    with fixed_weights(prepared):
        threads = [threading.Thread(target=lambda: found.append(tokens(prepared))) for _ in range(2)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert len(found) == 2 and all(torch.equal(t, want) for t in found)
