"""What `eval/pretrain.py` does beyond one Llama in one go: experts, a time to fill, several ranks, shards, overlap."""

from __future__ import annotations

import csv
import hashlib
import importlib
import json
import os
import random
import shutil
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from support.two_ranks import on_two_ranks
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralForCausalLM

from aoquant import cli, load_pretrained
from aoquant.integrations import job
from aoquant.layers.packed_experts import PackedExperts

EVAL = Path(__file__).parents[2] / "eval"
SMALL: dict[str, Any] = {
    "vocab": 320, "hidden": 128, "intermediate": 128, "layers": 1, "heads": 2, "kv_heads": 1, "window": 32, "batch": 4,
    "steps": 6, "warmup": 2, "lr": 1e-2, "log_every": 2, "anneal_fraction": 0.0, "device": "cpu",
}  # fmt: skip
MOE = SMALL | {"arch": "moe", "experts": 4, "top_k": 2}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    monkeypatch.syspath_prepend(str(EVAL))
    names = ("pretrain", "pretrain_loop", "pretrain_config", "pretrain_model", "overlap", "encoded")
    return {name: importlib.import_module(name) for name in names}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    draw, words = random.Random(0), ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "two", "dogs"]
    path = tmp_path / "text.txt"
    path.write_text("\n<|endoftext|>\n".join(" ".join(draw.choices(words, k=40)) for _ in range(60)), encoding="utf-8")
    return path


def log_of(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "train_log.json").read_text())
    return found


def weights_of(out: Path) -> dict[str, torch.Tensor]:
    return {key: t for file in sorted((out / "model").glob("*.safetensors")) for key, t in load_file(file).items()}


def assert_same(one: Path, other: Path) -> None:
    a, b = weights_of(one), weights_of(other)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert log_of(one)["losses"] == log_of(other)["losses"]


def test_a_mixtral_is_trained_resumed_and_saved_in_shards(
    scripts: dict[str, ModuleType], text: Path, tmp_path: Path
) -> None:
    pretrain, corpus = scripts["pretrain"], tmp_path / "corpus"
    settings = {"text": (text,), "validation": (text,), "held_out": (text,), "corpus": corpus, "shard_mb": 0.2} | MOE
    pretrain.main(pretrain.Config(**settings, out=tmp_path / "straight"))
    written = (corpus / "ids.pt").stat().st_mtime_ns
    for options in ({"stop_at": 3}, {"resume": True}):
        pretrain.main(pretrain.Config(**settings, out=tmp_path / "halves", **options))
    assert (corpus / "ids.pt").stat().st_mtime_ns == written  # encoded once
    assert_same(tmp_path / "straight", tmp_path / "halves")
    log, folder = log_of(tmp_path / "straight"), tmp_path / "straight" / "model"
    assert log["losses"][-1] < log["losses"][0]
    assert log["overlap_with_held_out"]["share"] == 1  # it was trained on its held-out text
    with (folder.parent / "loss.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["2", "4", "6"]
    assert [float(row["loss"]) for row in rows] == log["losses"]
    made_from, sha = (
        log["made_from"],
        [hashlib.sha256(p.read_bytes()).hexdigest() for p in (text, folder / "tokenizer.json")],
    )
    assert [made_from[name] for name in ("text", "anneal", "validation", "held_out")] == [sha[:1], [], sha[:1], sha[:1]]
    assert made_from["tokenizer"] == sha[1]
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 2 and all(shard.stat().st_size <= 200_000 for shard in shards)
    assert set(log["model_sha256"]) == {shard.name for shard in shards}
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert isinstance(model, MixtralForCausalLM) and model.dtype == torch.bfloat16
    assert sum(p.numel() for p in model.parameters()) == log["parameters"]
    ids = AutoTokenizer.from_pretrained(folder)("the cat sat on a mat", return_tensors="pt").input_ids
    assert model(input_ids=ids, labels=ids).loss < 6


def test_other_text_does_not_take_a_folder_of_ids(scripts: dict[str, ModuleType], text: Path, tmp_path: Path) -> None:
    pretrain, other = scripts["pretrain"], tmp_path / "other.txt"
    other.write_text(text.read_text() + " more", encoding="utf-8")
    settings = SMALL | {"steps": 2, "corpus": tmp_path / "corpus"}
    pretrain.main(pretrain.Config(text=(text,), anneal=(text,), out=tmp_path / "a", **settings))
    settings |= {"text": (text,), "anneal": (text,)}
    for change, said in (({"text": (other,)}, "text"), ({"vocab": 330}, "vocab"), ({"anneal": ()}, "anneal"),
                         ({"validation": (text,)}, "validation")):  # fmt: skip
        with pytest.raises(ValueError, match=rf"differs in {said}$"):
            pretrain.main(pretrain.Config(**settings | change, out=tmp_path / "b"))


def test_experts_are_kept_busy(scripts: dict[str, ModuleType], text: Path, tmp_path: Path) -> None:
    """The added loss is transformers' own, and is least when all experts have equal shares."""
    pretrain, loop = scripts["pretrain"], scripts["pretrain_model"]
    config = pretrain.Config(text=(text,), out=tmp_path, **MOE | {"balance": 0.5})
    model = pretrain.build_model(config)
    windows = torch.randint(320, (4, 33), generator=torch.Generator().manual_seed(0))
    found = loop.window_loss(model, windows)
    own = model(input_ids=windows[:, :-1], output_router_logits=True)
    torch.testing.assert_close(found.balance, 0.5 * own.aux_loss)
    wanted = torch.nn.functional.cross_entropy(own.logits.flatten(0, 1), windows[:, 1:].flatten())
    torch.testing.assert_close(found.token, wanted)
    found.balance.backward()
    assert torch.count_nonzero(model.model.layers[0].mlp.gate.weight.grad)
    routed = torch.randn(8, 128), torch.arange(16).view(8, 2) % 4, torch.rand(8, 2)
    spy = mock.patch.object(torch.nn.functional, "grouped_mm", wraps=torch.nn.functional.grouped_mm)
    with torch.autocast("cpu", torch.bfloat16), spy as called:  # experts are multiplied in autocast's dtype
        loop.autocast_experts(model.model.layers[0].mlp.experts, *routed)
    assert [call.args[1].dtype for call in called.call_args_list] == [torch.bfloat16] * 2


def test_seconds_are_filled_by_the_steps_that_the_log_states(
    scripts: dict[str, ModuleType], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that found its steps, stopped and went on is the run that was given them."""
    pretrain = scripts["pretrain"]
    for module in ("pretrain_loop", "pretrain_config"):
        monkeypatch.setattr(scripts[module], "MEASURED", 8)
        monkeypatch.setattr(scripts[module], "COMPILING", 3)
    settings = SMALL | {"text": (text,), "corpus": tmp_path / "corpus", "warmup": 8, "anneal": (text,)}
    settings |= {"anneal_fraction": 0.25}
    del settings["steps"]
    pretrain.main(pretrain.Config(**settings, out=tmp_path / "timed", seconds=1.5, limit=0.01))
    stopped = log_of(tmp_path / "timed")
    assert 8 < stopped["last_step"] < stopped["steps"] == stopped["config"]["steps"] < 3000
    pretrain.main(pretrain.Config(**settings, out=tmp_path / "timed", seconds=1.5, resume=True))
    steps = log_of(tmp_path / "timed")["last_step"]
    assert steps == stopped["steps"]
    pretrain.main(pretrain.Config(**settings, out=tmp_path / "given", steps=steps))
    assert_same(tmp_path / "timed", tmp_path / "given")
    with pytest.raises(ValueError, match=r"seconds must last|warmup must be"):
        pretrain.main(pretrain.Config(**settings, out=tmp_path / "short", seconds=0.001))


def train_on(rank: int, port: int, queue: Any) -> None:
    """A rank's run, straight and in halves; puts what went wrong."""
    torch.set_num_threads(1)
    sys.path.insert(0, str(EVAL))
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        pretrain, place = importlib.import_module("pretrain"), Path(os.environ["PRETRAIN_TEST"])
        for out, calls in (("straight", [{}]), ("halves", [{"stop_at": 3}, {"resume": True}])):
            for options in calls:
                settings = MOE | {"text": (place / "text.txt",), "corpus": place / "corpus"}
                pretrain.main(pretrain.Config(**settings, out=place / out, **options))
        torch.distributed.destroy_process_group()
        queue.put("")
    except Exception:
        queue.put(traceback.format_exc())


@pytest.mark.slow
def test_two_ranks_train_as_one_and_resume(
    scripts: dict[str, ModuleType], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRETRAIN_TEST", str(tmp_path))
    assert on_two_ranks(train_on) == ["", ""]
    assert_same(tmp_path / "straight", tmp_path / "halves")
    pretrain = scripts["pretrain"]
    settings = MOE | {"text": (text,), "corpus": tmp_path / "corpus"}
    with pytest.raises(ValueError, match="ranks from 2 to 1"):
        pretrain.main(pretrain.Config(**settings, out=tmp_path / "halves", resume=True))
    pretrain.main(pretrain.Config(**settings, out=tmp_path / "one"))
    assert log_of(tmp_path / "straight")["ranks"] == 2
    # means over halves are added up in another order, and experts are balanced half by half
    assert log_of(tmp_path / "one")["losses"] == pytest.approx(log_of(tmp_path / "straight")["losses"], abs=2e-2)


def test_run_gives_the_table_of_a_mixtral_whose_experts_are_int4(
    scripts: dict[str, ModuleType], tmp_path: Path
) -> None:
    """From text to a checkpoint: pretrained, then float, PTQ and QAT of its experts alone."""
    pages = (EVAL / "assets" / "train.jsonl").read_text(encoding="utf-8").splitlines()[:4]
    text, out = tmp_path / "text.jsonl", tmp_path / "run"
    text.write_text("\n".join(pages), encoding="utf-8")
    settings = MOE | {"vocab": 384, "steps": 4, "window": 128, "shard_mb": 0.2}
    scripts["pretrain"].main(scripts["pretrain"].Config(text=(text,), out=tmp_path / "demo", **settings))
    options = ["--steps", "2", "--batch-size", "2", "--block", "64", "--limit", "1", "--device", "cpu"]
    shutil.copy(EVAL / "assets" / "heldout.jsonl", tmp_path / "test.jsonl")
    options += [
        "--train-text",
        str(text),
        "--wikitext",
        str(tmp_path),
        "--recipe",
        "int4-g32-experts",
        "--out",
        str(out),
    ]
    cli.main(["run", "--model", str(tmp_path / "demo" / "model"), *options])
    numbers = json.loads((out / job.RESULTS).read_text())
    words = [s["perplexity"]["word_perplexity"] for s in numbers["stages"]]
    assert len(set(words[:4])) == 4 and words[3] == words[4]
    assert numbers["min_sqnr_db"] == "inf"
    with (out / "report.csv").open() as file:
        rows = [row["fqn"] for row in csv.DictReader(file)]
    assert rows[:2] == [f"model.layers.0.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
    assert len(rows) == 3  # and the model's output
    assert "logits bit-equal" in (out / "report.md").read_text()
    experts = load_pretrained(out / "checkpoint").model.layers[0].mlp.experts
    assert all(isinstance(p.data, PackedExperts) for p in experts.parameters())


def test_overlap_counts_runs_of_words(scripts: dict[str, ModuleType]) -> None:
    words = [f"w{i}" for i in range(40)]
    page = " ".join(words[:20])  # 9 runs of 12 words
    other = " ".join(words[20:])
    training = [
        "none of these",
        f"Some, {' '.join(words[:13]).upper()}!",
        f"{words[13]} {words[14]}",
        "w20\nw21 @-@ w22",
    ]
    found = scripts["overlap"].overlap(training, [page, other, "short"])
    assert (found.runs, found.found, found.pages, found.pages_touched) == (18, 2, 3, 1)
    assert found.share == pytest.approx(2 / 18, abs=1e-6)
    assert scripts["overlap"].overlap([page], [" @,@ ".join(words[:20])]).share == 1  # punctuation is no word
    assert scripts["overlap"].overlap(training, ["short"]).share == 0
    assert scripts["overlap"].overlap([" ".join(words[:6]), " ".join(words[6:12])], [page]).found == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"top_k": 5}, "top_k must be in 1"),
        ({"experts": 1}, "experts must be at least 2"),
        ({"arch": "llama", "recipe": "int4-g32-experts"}, "it has no experts"),
        ({"recipe": "int4-g32-experts", "graph": True, "device": "cuda"}, "graph must be False with quantised experts"),
        ({"seconds": 5}, "warmup must be at least 50 with seconds"),
        ({"seconds": 5, "warmup": 60, "steps": 70, "stop_at": 61}, "stop_at must be None with seconds"),
        ({"held_out": (Path("no-such-file"),)}, "held_out must be paths"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_settings_that_are_refused(
    scripts: dict[str, ModuleType], text: Path, tmp_path: Path, change: Any, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        scripts["pretrain"].Config(**({"text": (text,), "out": tmp_path / "out"} | MOE | change))
