"""The experiments' tricks of training: each changes what it says, and goes on after a stop with the same bits."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.experiments import experiments_inputs, experiments_modules
from transformers import LlamaForCausalLM

from aoquant.formats import get_format

modules = pytest.fixture(experiments_modules)
inputs = pytest.fixture(scope="module")(experiments_inputs)


@pytest.mark.parametrize(
    "trick",
    [
        "average",
        "features",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("dampen", "freeze", "soft", "scales")),
    ],
)
def test_a_trick_changes_the_weights_and_goes_on_after_a_stop(
    modules: ModuleType, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trick: str
) -> None:
    tuning, students, rows = (importlib.import_module(f"experiments.{n}") for n in ("tuning", "students", "rows"))
    monkeypatch.setattr(tuning, "LOOK", 2)
    blocks = torch.arange(12 * 8).view(12, 8) % 31
    float_model = LlamaForCausalLM.from_pretrained(inputs / "model", dtype=torch.bfloat16)
    recipe = "intx4-g32/" if trick == "scales" else "mxfp4"
    student = students.Student(rows.Row("r", "", "aoquant", recipe, trick=trick), float_model, blocks)
    weights, kept = student.prepared(0).state_dict(), tmp_path / "kept.pt"

    def made(trick: str, until: float = math.inf) -> Any:
        budget = tuning.Budget(steps=4, batch=2, block=8)
        tune = tuning.FineTune(
            student.prepared(0), float_model, blocks, budget, compile=False, graph=False, trick=trick
        )
        while tune.run(weights, 0, 1e-2, kept=kept, until=until) is None:
            until = math.inf
        return tune.student.model.layers[0].mlp.up_proj.weight.detach()

    straight, stopped = made(trick), made(trick, until=0.0)
    assert torch.equal(straight, stopped)
    if trick in ("scales", "freeze"):  # below: on their own
        return
    plain = made("")
    assert not torch.equal(plain, straight)
    rounding = [(w - rounded(w)).float().norm() for w in (plain, straight)]
    assert trick != "dampen" or rounding[1] < rounding[0]


def test_a_weight_that_hops_to_and_fro_is_frozen_where_it_was_longer(modules: ModuleType) -> None:
    tricks = importlib.import_module("experiments.tricks")
    never, soon = torch.tensor(math.inf), torch.tensor(0.05)
    hops = tricks.Hops(torch.tensor([0.0, 0.0, 0.0], dtype=torch.bfloat16))
    for step in range(300):  # the first hops, mostly at 1; the second climbs; the third's scale alone goes to and fro
        hops.see(torch.tensor([float(step % 3 > 0), 2.0 ** (step // 8), 1 + step % 2 / 8], dtype=torch.bfloat16), never)
    assert not hops.frozen.any()
    hops.see(torch.tensor([0.0, 2.0**38, 1.0], dtype=torch.bfloat16), soon)
    assert hops.frozen.tolist() == [True, False, False] and hops.at[0] == 1.0
    hops.begin(torch.zeros(3, dtype=torch.bfloat16))
    assert not hops.frozen.any() and not hops.often.any()


def test_frozen_weights_stay(modules: ModuleType, inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tricks, students, rows = (importlib.import_module(f"experiments.{n}") for n in ("tricks", "students", "rows"))
    float_model = LlamaForCausalLM.from_pretrained(inputs / "model", dtype=torch.bfloat16)
    model = students.Student(rows.Row("r", "", "aoquant", "mxfp4"), float_model, torch.zeros(1, 8).long()).prepared(0)
    trained = [p for p in model.parameters() if p.requires_grad]
    masters, progress = [p.detach().float().clone() for p in trained], torch.tensor(1.0)
    freeze = tricks.Freeze(model, trained, masters, progress)
    hops, (layer, master) = freeze.hops[0], freeze.pairs[0]
    hops.often[0, 0] = 1.0
    kept = hops.last[0, 0].item()
    freeze.step()
    assert hops.frozen.sum() == 1 and master[0, 0] == layer.weight[0, 0] == kept
    master += 0.5
    freeze.step()
    assert master[0, 0] == kept and master[0, 1] != kept  # the optimizer moves the others alone


def test_a_soft_layer_goes_over_from_float_to_quantised(modules: ModuleType, inputs: Path) -> None:
    tricks, students, rows = (importlib.import_module(f"experiments.{n}") for n in ("tricks", "students", "rows"))
    float_model = LlamaForCausalLM.from_pretrained(inputs / "model", dtype=torch.bfloat16)
    student = students.Student(rows.Row("r", "", "aoquant", "mxfp4"), float_model, torch.zeros(1, 8).long())
    model, ids = student.prepared(0).eval(), torch.arange(8)[None]
    trained, progress = [p for p in model.parameters() if p.requires_grad], torch.tensor(0.0)
    quantised = model(ids).logits
    soft = tricks.Soft(model, trained, trained, progress)
    soft.begin()
    assert torch.equal(model(ids).logits, float_model.eval()(ids).logits)
    progress.fill_(tricks.SOFT / 2)
    soft.step()
    between = model(ids).logits
    assert not torch.equal(between, quantised) and not torch.equal(between, float_model(ids).logits)
    progress.fill_(tricks.SOFT)
    soft.step()
    assert torch.equal(model(ids).logits, quantised)


def test_learned_scales_move_relative_to_their_size(modules: ModuleType, inputs: Path) -> None:
    tricks, students, rows = (importlib.import_module(f"experiments.{n}") for n in ("tricks", "students", "rows"))
    float_model = LlamaForCausalLM.from_pretrained(inputs / "model", dtype=torch.bfloat16)
    row = rows.Row("r", "", "aoquant", "intx4-g32/", trick="scales")
    model = students.Student(row, float_model, torch.zeros(1, 8).long()).prepared(0)
    trained = [p for p in model.parameters() if p.requires_grad]
    masters = [p.detach().float().clone() for p in trained]
    scales = tricks.Scales(model, trained, masters, torch.tensor(0.0))
    scales.begin()
    p, master = scales.pairs[0]
    before, size = master.clone(), master.abs().mean()
    master += 0.01  # AdamW's step at a rate of .01
    scales.step()
    assert torch.allclose(master, before + 0.01 * size) and torch.equal(p, master.to(p.dtype))
    with pytest.raises(ValueError, match="scales needs a row"):
        tricks.Scales(float_model, [], [], torch.tensor(0.0))


def rounded(w: torch.Tensor) -> torch.Tensor:
    format = get_format("mxfp4")
    return format.decode(format.encode(w), w.dtype)
