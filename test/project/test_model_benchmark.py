"""benchmarks/model.py and compare.py run from end to end on a CPU: every part has its rows, and a variant that fails
does not end the run.
"""

from __future__ import annotations

import csv
import importlib
import subprocess
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from support import forked

ROOT = Path(__file__).resolve().parents[2]
VARIANTS = ["bf16", "int4-g128", "torchao:int4"]


def ran(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own."""
    return forked.script(ROOT / "benchmarks" / script, "--quick", *arguments)


def rows(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as opened:
        return list(csv.DictReader(opened))


@pytest.mark.slow
def test_every_part_has_its_rows(tmp_path: Path) -> None:
    run = ran("model.py", "--recipes", "int4-g128", "--torchao", "int4", "--out", str(tmp_path))
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    for part, hows in (("train", 2), ("generate", 2), ("prefill", 1)):
        found = rows(tmp_path / f"model_{part}.csv")
        assert [row["variant"] for row in found] == VARIANTS * hows
        assert all(row["torch"] and row["date"] and row["commit"] and row["command"] for row in found)
        for row in found:
            deploys = part != "train" and row["variant"] == "torchao:int4"  # its kernel is MSLK's, for GPUs
            assert bool(row["note"]) == deploys
            assert deploys or float(row["ms"]) > 0
    converted = rows(tmp_path / "model_convert.csv")
    assert [row["variant"] for row in converted] == VARIANTS[1:]
    assert float(converted[0]["ms"]) > 0 and converted[1]["note"].startswith("ImportError")


@pytest.mark.slow
def test_rows_are_appended_and_a_limit_ends_the_run(tmp_path: Path) -> None:
    arguments = ["prefill", "--recipes", "int4-g128", "--torchao", "--out", str(tmp_path)]
    assert ran("model.py", *arguments).returncode == 0
    assert ran("model.py", *arguments, "--limit", "0.0001").returncode == 0
    first, second, *late = rows(tmp_path / "model_prefill.csv")
    assert float(first["ms"]) > 0 and float(second["ms"]) > 0
    assert late and all(row["note"] == "not run: out of time" and not row["ms"] for row in late)


def test_every_variant_has_a_row_when_time_ends(tmp_path: Path) -> None:
    """Those of a size, or of a way, that was not begun too."""
    arguments = ["generate", "--recipes", "int4-g128", "fp8", "--torchao", "int4", "--out", str(tmp_path)]
    run = ran("model.py", *arguments, "--how", "eager", "reduce-overhead", "--batch", "1", "2", "--limit", "0.0001")
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    found = [(row["how"], row["batch"], row["variant"], row["note"]) for row in rows(tmp_path / "model_generate.csv")]
    variants = ("bf16", "int4-g128", "fp8", "torchao:int4")
    late = "not run: out of time"
    assert found == [(h, b, v, late) for h in ("eager", "reduce-overhead") for b in "12" for v in variants]


@pytest.mark.slow
def test_the_users_own_compiler_is_measured(tmp_path: Path) -> None:
    arguments = ["generate", "--recipes", "int4-g128", "--torchao", "--out", str(tmp_path), "--how", "reduce-overhead"]
    run = ran("model.py", *arguments)
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    found = rows(tmp_path / "model_generate.csv")
    assert [(row["how"], row["variant"]) for row in found] == [("reduce-overhead", v) for v in VARIANTS[:2]]
    assert all(float(row["ms"]) > 0 for row in found), found


@pytest.mark.parametrize("alone", [True, False])
def test_models_live_together_or_one_at_a_time(alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    beside = importlib.import_module("beside")
    living: weakref.WeakSet[object] = weakref.WeakSet()
    most = 0

    class Model:
        def __call__(self) -> None:
            nonlocal most
            most = max(most, len(living))

    def ready(variant: str) -> Model:
        if variant == "broken":
            raise MemoryError("too large")
        model = Model()
        living.add(model)
        return model

    cell = beside.Cell({}, ready, 1, 2, torch.device("cpu"), alone=alone)
    found = list(beside.measured(cell, ["broken", "int4-g128"], beside.Deadline(0)))
    assert [row["variant"] for row in found] == ["bf16", "broken", "int4-g128"]
    assert [bool(row["note"]) for row in found] == [False, True, False] and found[1]["ms"] == ""
    assert found[2]["bf16_ms"] > 0 and found[2]["speed"] > 0
    assert most == (1 if alone else 2)


def test_the_small_model_is_that_of_the_experiments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    llamas = importlib.import_module("llamas")
    said = (ROOT / "benchmarks" / "results" / "experiments.md").read_text(encoding="utf-8")
    model = llamas.build(llamas.SMALL, torch.device("meta"))
    model.tie_weights()
    assert f"- dense parameters: {sum(p.numel() for p in model.parameters())}\n" in said


def test_ranks_train_on_parts_of_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """One behind the other; a text that is too short for them, or has tokens that the model has not, is refused."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    model_train = importlib.import_module("model_train")
    text = model_train.text_ids([ROOT / "eval" / "assets" / "heldout.jsonl"])
    size = model_train.Size(128, 256, 4, 2, 2, 8192)

    def of(rank: int, size: Any = size, tokens: int = 64) -> torch.Tensor:
        monkeypatch.setattr(model_train.dist, "get_rank", lambda: rank)
        monkeypatch.setattr(model_train.dist, "get_world_size", lambda: 2)
        rest = "adamw", "eager", "blocks", "inductor", True, False, torch.device("cpu"), text
        ids: torch.Tensor = model_train.ids_of(model_train.Training(size, 3, tokens, *rest))
        return ids

    assert torch.equal(torch.cat([of(0), of(1)]), text[: 6 * 64].view(6, 64))
    with pytest.raises(ValueError, match="must have 60,000 tokens"):
        of(0, tokens=10_000)
    with pytest.raises(ValueError, match="below the vocabulary of 256"):
        of(0, model_train.Size(128, 256, 4, 2, 2, 256))


@pytest.mark.slow
def test_an_unknown_variant_is_refused() -> None:
    run = ran("model.py", "--torchao", "int5")
    assert run.returncode == 2
    assert "'torchao:int5' is no variant; torchao's are torchao:int4, " in run.stderr


@pytest.mark.slow
def test_two_checkouts_are_compared(tmp_path: Path) -> None:
    """This checkout with itself, under a slack that no noise fills, and under one that every row exceeds."""
    arguments = [str(ROOT), "host", "--only", "int4-g128", "--turns", "1", "--out", str(tmp_path / "compare.csv")]
    run = ran("compare.py", *arguments, "--slack", "50")
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    found = rows(tmp_path / "compare.csv")
    variants = ("step", "no grad", "fixed weights", "packed")
    assert {row["variant"] for row in found} == {f"int4-g128: {variant}" for variant in variants}
    assert {row["number"] for row in found} == {"host_us", "to_linear"}
    assert all(float(row["old"]) > 0 and float(row["new"]) > 0 for row in found)
    run = ran("compare.py", *arguments, "--slack", "-0.99")
    assert run.returncode == 1
    assert all(row["flag"] == "SLOWER" for row in rows(tmp_path / "compare.csv"))


@pytest.mark.slow
def test_models_and_experts_of_two_checkouts_are_compared(tmp_path: Path) -> None:
    out = tmp_path / "compare.csv"
    arguments = [str(ROOT), "graph", "generate", "experts", "--only", "int4-g128", "--turns", "1", "--slack", "50"]
    run = ran("compare.py", *arguments, "--out", str(out))
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    found = [(row["suite"], row["shape"], row["how"]) for row in rows(out)]
    layer = [("graph", "K128 N128", how) for how in ("compiled", "eager")]
    experts = [("experts", shape, part) for part in ("train", "decode") for shape in ("tiny", "tiny-gpt-oss")]
    assert found == [*layer, ("generate", "128 wide, 2 layers", "eager"), *experts]
    assert all(float(row["old"]) > 0 and float(row["new"]) > 0 for row in rows(out))
