"""The experiments' fine-tune on a GPU: one CUDA graph of compiled layers trains what eager steps train."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
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
    ("kind", "recipe", "trick", "compile"),
    [
        *(("aoquant", recipe, "", True) for recipe in ("nvfp4", "int4-g128", "quartet2")),
        *(("torchao", "int8-int4", "", False), ("lora", "int4-g128", "", False), ("float", "", "", True)),
        *(("aoquant", "mxfp4", trick, trick != "soft") for trick in ("average", "dampen", "freeze", "soft")),
        ("aoquant", "intx4-g32/", "scales", True),
    ],
)
def test_a_graph_trains_as_eager_steps_do(
    modules: dict[str, ModuleType], tmp_path: Path, kind: str, recipe: str, trick: str, compile: bool
) -> None:
    """Compiled norms round otherwise, and gradients add in any order: losses are equal to 2 %."""
    tuning, students, rows = (modules[name] for name in ("tuning", "students", "rows"))
    torch._dynamo.reset()
    blocks = torch.randint(512, (16, 128), generator=torch.Generator().manual_seed(0))
    row = rows.Row("r", "", kind, recipe, trick=trick)
    student = students.Student(row, llama(tuning.ATTENTION), blocks)
    budget, weights = tuning.Budget(steps=40, batch=4, block=128), student.prepared(0).state_dict()

    def tuned(**how: Any) -> Any:
        return tuning.FineTune(student.prepared(0), None, blocks, budget, **how, trick=trick)

    eager = tuned(compile=False, graph=False)
    wanted = eager.run(weights, 0, 1e-3)
    fast = tuned(compile=compile, graph=True)
    losses = fast.run(weights, 0, 1e-3)
    assert losses[-1] < losses[0] - 0.1
    assert losses == pytest.approx(wanted, rel=0.02)
    if trick:  # its state begins anew
        for tune in (eager, fast):
            assert tune.run(weights, 0, 1e-3) == pytest.approx(losses, rel=0.02)
    else:  # a run that is cut short goes on in place: the graph reads what was loaded
        kept = tmp_path / "kept.pt"
        assert fast.run(weights, 0, 1e-3, kept=kept, until=0.0) is None and kept.is_file()
        assert fast.run(weights, 0, 1e-3, kept=kept, until=math.inf) == pytest.approx(losses, rel=0.02)


def test_rows_of_a_public_model_train_in_a_graph_as_without_one(
    modules: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers, KV caches, held scales of a calibrated start, both losses."""
    main, worker = (importlib.import_module(f"real_models.{name}") for name in ("__main__", "worker"))
    llama("sdpa").save_pretrained(tmp_path / "model")
    texts = {}
    for name, pages in (("train", 300), ("wikitext", 3), ("other", 2), ("validation", 2)):
        ids = torch.randint(2, 512, (90 * pages,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
        lengths = torch.full((pages,), 90)
        texts |= {f"{name}.ids": ids, f"{name}.lengths": lengths, f"{name}.words": lengths // 2}
    save_file(texts, tmp_path / "t.safetensors", {"bos": "1"})

    def losses(csv: str) -> dict[tuple[str, str], list[float]]:
        files = ["--model", str(tmp_path / "model"), "--tokens-file", str(tmp_path / "t.safetensors")]
        names = (
            "int4-g128",
            "nvfp4",
            "quartet2",
            "kv-fp8",
            "int4-g32-kv-int4-token-head",
            "int4-g128+gptq",
            "float-ce",
        )
        size = ["--tokens", "8192", "--batch", "4", "--block", "128", "--rate", "1e-3", "--csv", str(tmp_path / csv)]
        main.main([*files, *size, "--rows", *names])
        done = [line for line in worker.read(tmp_path / csv) if line["stage"] == "qat"]
        assert len(done) == len(names) and {line["equal"] for line in done} == {"True"}
        return {(line["row"], k): float(line[k]) for line in done for k in ("first_loss", "last_loss")}

    graph = losses("graph.csv")
    monkeypatch.setattr(worker, "graphed", lambda step, *_: step)
    assert graph == pytest.approx(losses("eager.csv"), rel=0.03)


def test_a_score_does_not_depend_on_what_was_scored_before(modules: dict[str, ModuleType]) -> None:
    causal = importlib.import_module("real_models.causal")
    torch._dynamo.reset()
    torch.manual_seed(0)
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=512, max_position_embeddings=2048, **size)
    teacher, model = (LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).cuda().eval() for _ in range(2))
    texts = {}
    for name, lengths in (("train", [64]), ("wikitext", [5000, 700, 30]), ("other", [3000, 12, 900])):
        ids = torch.randint(2, 512, (sum(lengths),), dtype=torch.int32)
        texts |= {f"{name}.ids": ids, f"{name}.lengths": torch.tensor(lengths), f"{name}.words": torch.tensor(lengths)}
    scorer = causal.CausalLM(teacher, texts, bos=1, batch=1, block=32)
    first, second = (scorer.score(model)["nats"] for _ in range(2))
    assert torch.equal(first, second)
    causal.CausalLM(teacher, texts, 1, 1, 32, ("other",)).score(teacher)
    assert torch.equal(scorer.score(model)["nats"], first)
