"""Smoke tests of eval/experiments: a table from end to end, stop and resume, failed checks, the committed pages."""

from __future__ import annotations

import csv
import importlib
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.experiments import ROOT, arguments, experiments_inputs, experiments_modules, runs
from transformers import LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

modules = pytest.fixture(experiments_modules)
inputs = pytest.fixture(scope="module")(experiments_inputs)
RESULTS = ROOT / "benchmarks" / "results"
GOOD = {"min_sqnr_db": "inf", "cpu_codes_equal": True, "cpu_nats_a_word": 0.0106, "transformers_word_perplexity": 20.1}


def imported(*names: str) -> list[Any]:
    return [importlib.import_module(f"experiments.{name}") for name in names]


def call(*given: str) -> None:
    (command,) = imported("command")
    command.main(command.options([*given, "--commit", "abc"]))


def by_row(path: Path) -> dict[str, dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return {row["row"]: row for row in csv.DictReader(file)}


def results_of(out: Path, stage: str) -> dict[str, Any]:
    return {r["run"]["row"]: r["result"] for r in reversed(runs(out)) if r["run"]["stage"] == stage}


def test_a_table_from_end_to_end(modules: ModuleType, inputs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    given = arguments(inputs, out, "--jobs", "0", "--rows", "bf16", "int4", "theirs")
    call(*given, "--dry-run")
    assert not out.exists()
    call(*given)
    found = runs(out)
    ours = [r["result"] for r in found if (r["run"]["row"], r["run"]["stage"]) == ("int4", "qat")]
    assert len(ours) == 2
    for result in ours:
        assert result["prepared_word_perplexity"] == result["word_perplexity"] and result["same_per_document"]
    assert results_of(out, "qat")["bf16"]["last_loss"] < results_of(out, "qat")["bf16"]["first_loss"]
    assert results_of(out, "checks")["int4"]["min_sqnr_db"] == "inf"
    rows = by_row(out / "results.csv")
    assert rows["int4"]["before and after convert"] == "equal" and rows["int4"]["bits"] == "4.5"
    assert (out / "results.md").is_file() and (out / "perplexity.png").is_file()
    call(*given)
    call(*given, "--cost", "--table")
    assert runs(out) == found  # nothing is done twice, and --table runs nothing


@pytest.mark.slow
def test_a_model_of_experts_from_end_to_end(modules: ModuleType, inputs: Path, tmp_path: Path) -> None:
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = MixtralConfig(
        vocab_size=8192, max_position_embeddings=64, num_local_experts=2, num_key_value_heads=1, **small
    )
    MixtralForCausalLM._from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    for file in (inputs / "model").glob("tokenizer*"):
        shutil.copyfile(file, tmp_path / "model" / file.name)
    (tmp_path / "configs").mkdir()
    for name in ("bf16-moe", "moe-int4-g32-experts"):
        text = (ROOT / "eval" / "experiments" / "configs" / f"{name}.toml").read_text()
        (tmp_path / "configs" / f"{name}.toml").write_text(f"{text}learning_rates = [1e-3]\n")
    more = ("--configs", str(tmp_path / "configs"), "--jobs", "0", "--seeds", "1", "--losses", "kl")
    given = arguments(inputs, tmp_path / "out", *more)
    given[:2] = ["--moe-model", str(tmp_path / "model")]  # without --model
    call(*given)
    rows = by_row(tmp_path / "out" / "results.csv")
    assert rows["moe-int4-g32-experts"]["before and after convert"] == "equal" and rows["bf16-moe"]["QAT"]


@pytest.mark.slow
def test_processes_an_export_lora_and_costs(modules: ModuleType, inputs: Path, tmp_path: Path) -> None:
    out, environment = tmp_path / "out", os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for more in (("exported", "lora", "--jobs", "2"), ("exported", "--cost")):
        command = [sys.executable, "eval/experiments", *arguments(inputs, out, "--rows", *more)]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr + "".join(p.read_text()[-3000:] for p in (out / "logs").glob("*.log"))
    found, checked = results_of(out, "qat"), results_of(out, "checks")["exported"]
    assert found["lora"]["prepared_word_perplexity"] == found["lora"]["word_perplexity"]
    assert math.isclose(checked["transformers_word_perplexity"], found["exported"]["word_perplexity"], rel_tol=2e-3)
    assert results_of(out, "cost").keys() == results_of(out, "generate").keys() == {"exported"}


@pytest.mark.parametrize(
    ("trick", "recipe"),
    [
        ("average", "mxfp4"),
        pytest.param("", "quartet", marks=pytest.mark.slow),  # its backward uses stochastic rounding
        *(pytest.param(name, "mxfp4", marks=pytest.mark.slow) for name in ("features", "dampen", "freeze", "soft")),
        pytest.param("scales", "intx4-g32/", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_was_stopped_ends_with_the_same_bits(
    modules: ModuleType, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trick: str, recipe: str
) -> None:
    tuning, students, rows = imported("tuning", "students", "rows")
    monkeypatch.setattr(tuning, "LOOK", 2)
    blocks = torch.arange(12 * 8).view(12, 8) % 31
    float_model = LlamaForCausalLM.from_pretrained(inputs / "model", dtype=torch.bfloat16)
    student = students.Student(rows.Row("r", "", "aoquant", recipe, trick=trick), float_model, blocks)
    weights, kept = student.prepared(0).state_dict(), tmp_path / "kept.pt"

    def weight(trick: str, until: float = math.inf) -> torch.Tensor:
        budget = tuning.Budget(steps=4, batch=2, block=8)
        options: Any = {"compile": False, "graph": False, "trick": trick}
        tune = tuning.FineTune(student.prepared(0), float_model, blocks, budget, **options)
        while tune.run(weights, 0, 1e-2, kept=kept, until=until) is None:
            assert kept.is_file()
            with pytest.raises(ValueError, match="must be of a run of 10 steps"):
                tune.run(weights, 0, 1e-2, steps=10, kept=kept)
            until = math.inf
        assert not kept.exists()
        return tune.student.model.layers[0].mlp.up_proj.weight.detach()

    straight = weight(trick)
    assert torch.equal(straight, weight(trick, until=0.0))
    if trick not in ("", "freeze", "scales"):  # four steps are too few to freeze; scales move no weight
        assert not torch.equal(straight, weight(""))


def test_results_belong_to_their_texts(modules: ModuleType, inputs: Path, tmp_path: Path) -> None:
    command, setting = imported("command", "setting")
    text, out = tmp_path / "other.txt", tmp_path / "out"
    out.mkdir()
    text.write_text((inputs / "text.txt").read_text())

    def settings(*more: str) -> Any:
        made = setting.Setting(command.options([*arguments(inputs, out), *more]), "dense")
        made.tokenise()
        return made.settings

    assert settings("--text", str(text)) == settings()  # one text under two names
    text.write_text(text.read_text().replace("cat", "mat"))
    assert settings("--text", str(text)) != settings()


@pytest.mark.parametrize(
    ("stage", "change", "name"),
    [
        ("checks", {}, None),
        ("checks", {"min_sqnr_db": "21.0"}, "SQNR"),
        ("checks", {"cpu_codes_equal": False}, "codes on a CPU"),
        ("checks", {"cpu_nats_a_word": 0.05}, "nats a word on a CPU"),
        ("checks", {"transformers_word_perplexity": 1.0}, "exported"),
        ("checks", {"transformers_word_perplexity": "KeyError"}, "exported"),
        ("checks", {"not_exported": "needs a package", "transformers_word_perplexity": None}, None),
        ("qat", {"same_per_document": False}, "convert"),
        ("qat", {"prepared_word_perplexity": 20.001}, "convert"),
    ],
)
def test_a_check_that_fails_fails_the_table(
    modules: ModuleType, stage: str, change: dict[str, Any], name: str | None
) -> None:
    records, table, rows = imported("records", "table", "rows")
    run, losses = records.Run, {3e-4: 2.6, 1e-3: 2.0, 3e-3: 3.0}  # on validation pages, by learning rate
    score = {"word_perplexity": 20.0, "prepared_word_perplexity": 20.0, "validation_loss": 2.0, "weight_bits": 4.0}
    found: dict[Any, dict[str, Any]] = {
        run("bf16", "float"): {"word_perplexity": 10.0},
        run("a", "ptq"): {"word_perplexity": 40.0},
        **{run("a", "search", "kl", rate): {"validation_loss": v} for rate, v in losses.items()},
        run("a", "qat", "kl", 1e-3, 0): score,
        run("a", "checks", "kl", 1e-3, 0): GOOD,
    }
    found[run("a", stage, "kl", 1e-3, 0)] = found[run("a", stage, "kl", 1e-3, 0)] | change
    row = rows.Row("a", "", "aoquant", "mxfp4", losses=("kl",), learning_rates=(*losses,))
    (line,) = table.lines({"a": row}, found)
    assert line.rate == 1e-3 and line.recovered() == pytest.approx([0.5])  # of log perplexity
    broken = table.broken({"a": row}, found)
    assert len(broken) == (name is not None) and all(b.startswith("a, kl: ") and str(name) in b for b in broken)


@pytest.mark.parametrize("name", ["experiments", "experiments_earlier", "experiments_moe"])
def test_the_committed_runs_make_the_committed_table(modules: ModuleType, tmp_path: Path, name: str) -> None:
    shutil.copyfile(RESULTS / f"{name}_runs.jsonl", tmp_path / "runs.jsonl")
    call("--out", str(tmp_path), "--table")
    assert (tmp_path / "results.csv").read_text() == (RESULTS / f"{name}.csv").read_text()
    assert (tmp_path / "results.md").read_text() == (RESULTS / f"{name}.md").read_text()


def test_the_page_holds_what_the_committed_runs_say(modules: ModuleType) -> None:
    page = (ROOT / "docs" / "evidence" / "experiments.md").read_text(encoding="utf-8")
    durations, checked, *others = imported("durations", "checked", "losses", "torchao_by_cross_entropy", "tricks_page")
    for made in (durations.durations, checked.checked, *(module.published for module in others)):
        assert f"\n{made(RESULTS)}\n" in page, made.__module__


def test_the_pages_are_written_from_a_table_and_a_second_time_change_nothing(
    modules: ModuleType, tmp_path: Path
) -> None:
    records, table, rows, publish = imported("records", "table", "rows", "publish")
    out, root, every, run = tmp_path / "out", tmp_path / "root", rows.load_all(), records.Run
    pages = ("docs/evidence/experiments.md",)
    figures = (f"benchmarks/results/{name}.csv" for name in ("recover_h200", "gradients", "pretrain_mixes_h200"))
    for name in (*pages, "docs/figures/draw.py", *figures):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, root / name)
    out.mkdir()
    (out / "runs.jsonl").write_text("")
    kept = {name: every[name] for name in ("bf16", "int4-g128", "torchao-int4-g128")}
    facts = {"device": "a GPU", "date": "2026-01-02", "dense parameters": 2e7, "dense tokens a run": 1e7}
    found = {run("bf16", "float"): {"word_perplexity": 50.0}}
    for name, qat in (("int4-g128", 53.0), ("torchao-int4-g128", 57.0)):
        score = {"validation_loss": 1.0, "word_perplexity": qat, "prepared_word_perplexity": qat, "weight_bits": 4.25}
        found |= {run(name, "ptq"): {"word_perplexity": 70.0}, run(name, "qat", "kl", 3e-4, 0): score}
    table.write(out, kept, found, facts)
    publish.publish(out, root=root)
    first = {name: (root / name).read_text(encoding="utf-8") for name in pages}
    assert "| `int4-g128` | 4.25 | 70.00 | 53.00 | 82.7 | 1 | 57.00 |" in first["docs/evidence/experiments.md"]
    publish.publish(out, root=root)
    assert {name: (root / name).read_text(encoding="utf-8") for name in pages} == first
