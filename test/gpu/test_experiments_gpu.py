"""The experiments' fine-tune on a GPU: one CUDA graph of compiled layers trains what eager steps train."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

pytestmark = pytest.mark.gpu
EVAL = Path(__file__).parents[2] / "eval"


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    monkeypatch.syspath_prepend(str(EVAL))
    return {name: importlib.import_module(f"experiments.{name}") for name in ("tuning", "students", "rows")}


def llama(attention: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    size = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=512, max_position_embeddings=128, tie_word_embeddings=True, **size)
    model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).cuda().eval()
    model.set_attn_implementation(attention)
    return model


@pytest.mark.parametrize(
    ("kind", "recipe", "compile"),
    [("aoquant", "nvfp4", True), ("aoquant", "int4-g128", True), ("aoquant", "quartet2", True), ("torchao", "int8-int4", False),
     ("lora", "int4-g128", False), ("float", "", True)],
)  # fmt: skip
def test_a_graph_trains_as_eager_steps_do(
    modules: dict[str, ModuleType], tmp_path: Path, kind: str, recipe: str, compile: bool
) -> None:
    tuning, students, rows = (modules[name] for name in ("tuning", "students", "rows"))
    torch._dynamo.reset()
    blocks = torch.randint(512, (16, 128), generator=torch.Generator().manual_seed(0))
    float_model = llama(tuning.ATTENTION)
    student = students.Student(rows.Row("r", "", kind, recipe), float_model, blocks)
    budget = tuning.Budget(steps=40, batch=4, block=128)
    weights = student.prepared(0).state_dict()

    def tuned(**how: Any) -> Any:
        return tuning.FineTune(student.prepared(0), None, blocks, budget, **how)

    eager = tuned(compile=False, graph=False).run(weights, 0, 1e-3)
    fast = tuned(compile=compile, graph=True)
    losses = fast.run(weights, 0, 1e-3)
    assert losses[-1] < losses[0] - 0.1
    assert losses == pytest.approx(eager, rel=0.02)  # compiled norms round otherwise, and gradients add in any order
    kept = tmp_path / "kept.pt"
    assert fast.run(weights, 0, 1e-3, kept=kept, until=0.0) is None and kept.is_file()
    again = fast.run(weights, 0, 1e-3, kept=kept, until=math.inf)
    assert again == pytest.approx(losses, rel=0.02)  # in place: the graph reads what was loaded


@pytest.mark.parametrize("trick", ["average", "dampen", "freeze", "soft", "scales"])
def test_a_trick_in_a_graph_trains_as_in_eager_steps(modules: dict[str, ModuleType], trick: str) -> None:
    tuning, students, rows = (modules[name] for name in ("tuning", "students", "rows"))
    torch._dynamo.reset()
    blocks = torch.randint(512, (16, 128), generator=torch.Generator().manual_seed(0))
    row = rows.Row("r", "", "aoquant", "intx4-g32/" if trick == "scales" else "mxfp4", trick=trick)
    student = students.Student(row, llama(tuning.ATTENTION), blocks)
    budget, weights = tuning.Budget(steps=40, batch=4, block=128), student.prepared(0).state_dict()

    def losses(**how: Any) -> list[float]:
        tune = tuning.FineTune(student.prepared(0), None, blocks, budget, **how, trick=trick)
        found: list[float] = tune.run(weights, 0, 1e-3)
        assert found == pytest.approx(tune.run(weights, 0, 1e-3), rel=0.02)  # its state begins anew
        return found

    eager = losses(compile=False, graph=False)
    assert losses(compile=trick != "soft", graph=True) == pytest.approx(eager, rel=0.02)
    assert eager[-1] < eager[0] - 0.1
