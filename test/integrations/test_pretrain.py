"""Smoke tests of the scripts that make the demo: pretraining resumes and generation repeats bit for bit."""

from __future__ import annotations

import csv
import importlib
import json
import os
import random
import shutil
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.two_ranks import on_two_ranks
from transformers import AutoModelForCausalLM, MixtralForCausalLM

from aoquant import cli, load_pretrained
from aoquant.experts.packed_experts import PackedExperts
from aoquant.integrations import job
from aoquant.integrations.text import standard_text

ROOT = Path(__file__).parents[2]
EVAL = ROOT / "eval"
SMALL: dict[str, Any] = {
    "vocab": 320, "hidden": 128, "intermediate": 128, "layers": 1, "heads": 2, "kv_heads": 1, "window": 32, "batch": 4,
    "steps": 6, "warmup": 2, "lr": 1e-2, "log_every": 5, "anneal_share": 0.5, "anneal_fraction": 0.5, "device": "cpu",
}  # fmt: skip
MOE = SMALL | {"arch": "moe", "experts": 4, "top_k": 2, "shard_mb": 0.2}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a module of eval/, as a script there sees it."""
    monkeypatch.syspath_prepend(str(EVAL))
    return importlib.import_module


@pytest.fixture
def text(tmp_path: Path) -> Path:
    draw, words = random.Random(0), ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "two", "dogs", "é"]
    documents = [" ".join(draw.choices(words, k=draw.randint(5, 60))) + ".\n" for _ in range(100)]
    path = tmp_path / "text.txt"
    path.write_text("\n<|endoftext|>\n".join(documents), encoding="utf-8")
    return path


@pytest.fixture
def train(script: Any, text: Path, tmp_path: Path) -> Any:
    """Train a model in a folder of tmp_path, and return that folder."""

    def run(out: str, settings: dict[str, Any] = SMALL, **more: Any) -> Path:
        texts = dict.fromkeys(("text", "anneal", "validation", "held_out"), (text,))
        config = script("pretrain").Config(
            **texts | settings | {"out": tmp_path / out, "corpus": tmp_path / "ids"} | more
        )
        script("pretrain").main(config)
        return tmp_path / out

    return run


def log_of(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "train_log.json").read_text())
    return found


def assert_same_bits(one: Path, other: Path) -> None:
    """Compare weights, optimizer states, random states and losses of two runs."""
    a, b = (torch.load(out / "checkpoint.pt", weights_only=True) for out in (one, other))
    assert a["model"].keys() == b["model"].keys() and a["step"] == b["step"]
    assert all(torch.equal(value, b["model"][key]) for key, value in a["model"].items())
    for key, state in a["optimizer"]["state"].items():
        assert all(torch.equal(value, b["optimizer"]["state"][key][name]) for name, value in state.items())
    assert log_of(one)["losses"] == log_of(other)["losses"]
    for file in (one / "model").glob("*.safetensors"):
        assert file.read_bytes() == (other / "model" / file.name).read_bytes()


@pytest.mark.parametrize(
    "settings",
    [
        SMALL,
        MOE,
        *(
            pytest.param(SMALL | {"recipe": recipe, "backward": backward, "accumulate": 2}, marks=pytest.mark.slow)
            for recipe, backward in (("quartet2", None), ("quartet", None), ("gridflip", "nvfp4-sr"))
        ),
    ],
    ids=["llama", "experts", "quartet2", "quartet", "gridflip"],
)
def test_stopping_and_resuming_changes_no_bit(train: Any, settings: dict[str, Any]) -> None:
    straight = train("straight", settings)
    train("halves", settings, stop_at=4)  # within the last half, which anneals
    halves = train("halves", settings, resume=True)
    assert_same_bits(straight, halves)
    log = log_of(straight)
    assert log["losses"][-1] < log["losses"][0]
    assert log["overlap_with_held_out"]["share"] == 1  # it was trained on its held-out text
    files = sorted((straight / "model").glob("*.safetensors"))
    assert not any("random" in name for file in files for name in load_file(file))
    assert (len(files) > 2) == (settings is MOE) and set(log["model_sha256"]) == {file.name for file in files}
    model = AutoModelForCausalLM.from_pretrained(straight / "model")
    assert isinstance(model, MixtralForCausalLM) == (settings is MOE) and model.dtype == torch.bfloat16


def train_on(rank: int, port: int, queue: Any) -> None:
    """Run one rank, straight and in halves; put what went wrong."""
    torch.set_num_threads(1)
    sys.path.insert(0, str(EVAL))
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        pretrain, place = importlib.import_module("pretrain"), Path(os.environ["PRETRAIN_TEST"])
        for out, options in (("straight", {}), ("halves", {"stop_at": 3}), ("halves", {"resume": True})):
            settings = MOE | {"text": (place / "text.txt",), "corpus": place / "corpus"}
            pretrain.main(pretrain.Config(**settings, out=place / out, **options))
        torch.distributed.destroy_process_group()
        queue.put("")
    except Exception:
        queue.put(traceback.format_exc())


@pytest.mark.slow
def test_two_ranks_train_as_one_and_resume(train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRETRAIN_TEST", str(tmp_path))
    assert on_two_ranks(train_on) == ["", ""]
    assert_same_bits(tmp_path / "straight", tmp_path / "halves")
    alone = MOE | {"anneal": (), "validation": (), "held_out": ()}
    with pytest.raises(ValueError, match="ranks from 2 to 1"):
        train("halves", alone, resume=True)
    # means over halves are added up in another order, and experts are balanced half by half
    # the refused run made its ids with the tokenizer of the run that it was to go on with
    one = log_of(train("one", alone, corpus=tmp_path / "its own ids"))["losses"]
    assert one == pytest.approx(log_of(tmp_path / "straight")["losses"], abs=2e-2)


def test_micro_batches_are_the_batch(train: Any) -> None:
    """The mean over two halves is the mean over the whole, up to the order of sums."""
    found = [torch.load(train(str(n), accumulate=n) / "checkpoint.pt", weights_only=True)["losses"] for n in (1, 2)]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_the_loss_of_experts_is_transformers_own(script: Any, text: Path, tmp_path: Path) -> None:
    config = script("pretrain").Config(text=(text,), out=tmp_path, **MOE | {"balance": 0.5})
    model = script("pretrain").build_model(config)
    windows = torch.randint(320, (4, 33), generator=torch.Generator().manual_seed(0))
    found = script("pretrain_model").window_loss(model, windows)
    own = model(input_ids=windows[:, :-1], output_router_logits=True)
    torch.testing.assert_close(found.balance, 0.5 * own.aux_loss)
    wanted = torch.nn.functional.cross_entropy(own.logits.flatten(0, 1), windows[:, 1:].flatten())
    torch.testing.assert_close(found.token, wanted)


def test_other_settings_and_other_text_are_refused(train: Any, text: Path, tmp_path: Path) -> None:
    train("out", stop_at=2)
    with pytest.raises(ValueError, match=r"lr from 0\.01 to 0\.02"):
        train("out", resume=True, lr=2e-2)
    with pytest.raises(ValueError, match="out has"):
        train("out")
    other = tmp_path / "other.txt"
    other.write_text(text.read_text("utf-8") + " more", encoding="utf-8")
    with pytest.raises(ValueError, match=r"differs in text$"):
        train("new", text=(other,))


def test_run_gives_the_table_of_a_mixtral_whose_experts_are_int4(script: Any, tmp_path: Path) -> None:
    """From text to a checkpoint: pretrained, then float, PTQ and QAT of its experts alone."""
    text, out, pretrain = tmp_path / "text.jsonl", tmp_path / "run", script("pretrain")
    train, held_out = standard_text()
    text.write_text("".join(train.read_text(encoding="utf-8").splitlines(keepends=True)[:4]), encoding="utf-8")
    shutil.copy(held_out, tmp_path / "test.jsonl")
    settings = MOE | {"vocab": 384, "steps": 4, "window": 128, "anneal_fraction": 0.0}
    pretrain.main(pretrain.Config(text=(text,), out=tmp_path / "demo", **settings))
    options = ["--steps", "2", "--batch-size", "2", "--block", "64", "--limit", "1", "--device", "cpu"]
    options += ["--train-text", str(text), "--wikitext", str(tmp_path), "--recipe", "int4-g32-experts"]
    cli.main(["run", "--model", str(tmp_path / "demo" / "model"), *options, "--out", str(out)])
    numbers = json.loads((out / job.RESULTS).read_text())
    words = [s["perplexity"]["word_perplexity"] for s in numbers["stages"]]
    assert len(set(words[:3])) == 3 and words[2] == words[3]
    assert numbers["min_sqnr_db"] == "inf" and numbers["reload"] == "logits bit-equal"
    experts = load_pretrained(out / "checkpoint").model.layers[0].mlp.experts
    assert all(isinstance(p.data, PackedExperts) for p in experts.parameters())


@pytest.mark.slow
def test_recipes_are_compared_in_one_table_and_a_second_call_has_nothing_to_do(text: Path, tmp_path: Path) -> None:
    small = ["vocab=300", "hidden=128", "intermediate=128", "layers=1", "heads=2", "kv_heads=1", "window=16"]
    given = ["--variants", "bf16", "bf16, again", "--seeds", "1", "--steps", "8", "--jobs", "2", "--device", "cpu"]
    command = [sys.executable, str(ROOT / "benchmarks" / "pretrain_recipes.py"), "--text", str(text), *given]
    command += ["--validation", str(text), "--out", str(tmp_path / "out"), "--set", *small, "batch=2", "log_every=1"]
    printed = [subprocess.run(command, check=True, capture_output=True, text=True).stdout for _ in range(2)]
    lines = [[line for line in text.splitlines() if not line.startswith("date ")] for text in printed]
    assert lines[0] == lines[1]
    with (tmp_path / "out" / "pretrain_recipes.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(r["variant"], r["step"]) for r in rows] == [(n, s) for n in ("bf16", "bf16, again") for s in "2468"]
    assert rows[3]["held_out_loss"] == rows[7]["held_out_loss"] < rows[0]["held_out_loss"]  # a CPU adds in one order
