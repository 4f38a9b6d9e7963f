"""The experiments' command from end to end on a random Llama: runs, resumption, processes, the rows of the table."""

from __future__ import annotations

import csv
import dataclasses
import importlib
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.experiments import ROOT, arguments, experiments_inputs, experiments_modules, runs
from transformers import LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from aoquant.integrations.finetune import order_of_blocks

modules = pytest.fixture(experiments_modules)
inputs = pytest.fixture(scope="module")(experiments_inputs)


def call(modules: ModuleType, inputs: Path, out: Path, *more: str) -> None:
    main = importlib.import_module("experiments.command")
    main.main(main.options(arguments(inputs, out, "--jobs", "0", "--commit", "abc", *more)))


def test_a_table_from_end_to_end(
    modules: ModuleType, inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    call(modules, inputs, out, "--rows", "bf16", "int4", "theirs", "--dry-run")
    planned = capsys.readouterr().out
    # 8 steps of 64 tokens, 2 in a search
    assert "| int4   | kl     |                  2 |      2 |" in planned and "0.0 M tokens at least" in planned
    assert not out.exists()
    call(modules, inputs, out, "--rows", "bf16", "int4", "theirs")
    found = runs(out)
    kinds = [(r["run"]["row"], r["run"]["stage"]) for r in found]
    assert {k: kinds.count(k) for k in set(kinds) if k[1] != "search"} == {
        ("bf16", "float"): 1, ("bf16", "qat"): 1, ("int4", "ptq"): 1, ("int4", "qat"): 2, ("int4", "checks"): 1,
        ("theirs", "ptq"): 1, ("theirs", "qat"): 1,
    }  # fmt: skip
    assert kinds.count(("int4", "search")) >= 2 and {row for row, stage in kinds if stage == "search"} == {"int4"}
    ours = [r["result"] for r in found if (r["run"]["row"], r["run"]["stage"]) == ("int4", "qat")]
    for result in ours:
        assert result["prepared_word_perplexity"] == result["word_perplexity"] and result["same_per_document"]
    (tuned,) = [r["result"] for r in found if (r["run"]["row"], r["run"]["stage"]) == ("bf16", "qat")]
    assert tuned["last_loss"] < tuned["first_loss"]
    (checked,) = [r for r in found if r["run"]["stage"] == "checks"]
    assert checked["result"]["min_sqnr_db"] == "inf"
    assert {**checked["run"], "stage": "qat"} in [r["run"] for r in found] and checked["run"]["loss"] == "kl"
    assert {r["made"]["commit"] for r in found} == {"abc"}
    with (out / "results.csv").open() as file:
        rows = {row["row"]: row for row in csv.DictReader(file)}
    assert rows["int4"]["before and after convert"] == "equal" and rows["int4"]["bits"] == "4.5"
    assert float(rows["int4"]["QAT"]) > 0 and float(rows["int4"]["QAT sd"]) > 0
    assert rows["int4"]["log perplexity less the other's"].startswith("theirs: ")
    assert (
        rows["int4"]["validation, log less the other's"].endswith("(one seed)") and rows["int4"]["published"] == "True"
    )
    assert rows["int4"]["least SQNR of a layer, dB"] == "inf" and rows["bf16"]["rate at an end"] == "False"
    assert (out / "results.md").is_file() and (out / "perplexity.png").is_file()
    call(modules, inputs, out, "--rows", "bf16", "int4", "theirs")
    assert runs(out) == found  # nothing is done twice
    call(modules, inputs, out, "--rows", "bf16", "--cost", "--table")  # --table runs nothing
    assert runs(out) == found


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
    out, main = tmp_path / "out", importlib.import_module("experiments.command")
    given = arguments(
        inputs, out, "--configs", str(tmp_path / "configs"), "--jobs", "0", "--seeds", "1", "--losses", "kl"
    )
    given[:2] = ["--moe-model", str(tmp_path / "model")]  # without --model
    main.main(main.options(given))
    with (out / "results.csv").open() as file:
        rows = {row["row"]: row for row in csv.DictReader(file)}
    assert rows["moe-int4-g32-experts"]["before and after convert"] == "equal"
    assert rows["bf16-moe"]["QAT"] and "a Mixtral with" in (out / "measured.csv").read_text()


@pytest.mark.slow
def test_processes_an_export_lora_and_costs(modules: ModuleType, inputs: Path, tmp_path: Path) -> None:
    out, environment = tmp_path / "out", os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def process(*more: str) -> None:
        command = [sys.executable, "eval/experiments", *arguments(inputs, out, *more)]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        logs = "".join(path.read_text()[-3000:] for path in (out / "logs").glob("*.log"))
        assert done.returncode == 0, done.stderr + logs

    process("--rows", "exported", "lora", "--jobs", "2")
    found = {r["run"]["row"]: r["result"] for r in reversed(runs(out)) if r["run"]["stage"] == "qat"}
    (checked,) = [r["result"] for r in runs(out) if r["run"]["stage"] == "checks"]
    assert found["lora"]["prepared_word_perplexity"] == found["lora"]["word_perplexity"]
    assert math.isclose(checked["transformers_word_perplexity"], found["exported"]["word_perplexity"], rel_tol=2e-3)
    process("--rows", "exported", "--cost")
    cost, made = (
        {r["run"]["row"]: r["result"] for r in runs(out) if r["run"]["stage"] == s} for s in ("cost", "generate")
    )
    assert cost.keys() == made.keys() == {"exported"}
    assert cost["exported"]["train_tokens_s"] > 0 and made["exported"]["model_bytes"] > 0
    assert made["exported"]["tokens_s"] > 0 and made["exported"]["bf16_tokens_s"] > 0


@pytest.mark.slow
def test_a_run_that_met_its_deadline_goes_on_with_the_same_bits(
    modules: ModuleType, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuning, students, rows = (importlib.import_module(f"experiments.{n}") for n in ("tuning", "students", "rows"))
    monkeypatch.setattr(tuning, "LOOK", 2)
    blocks = torch.arange(12 * 16).view(12, 16) % 31
    float_model = LlamaForCausalLM.from_pretrained(inputs / "model", dtype=torch.bfloat16)
    row = rows.Row("r", "", "aoquant", "quartet")  # its backward draws random numbers
    student = students.Student(row, float_model, blocks)
    budget = tuning.Budget(steps=5, batch=2, block=16)

    def fresh() -> Any:
        return tuning.FineTune(student.prepared(0), float_model, blocks, budget, compile=False, graph=False)

    weights, kept = student.prepared(7).state_dict(), tmp_path / "kept.pt"
    straight = fresh()
    losses = straight.run(weights, 7, 1e-2)
    stopped = fresh()
    assert stopped.run(weights, 7, 1e-2, kept=kept, until=0.0) is None and kept.is_file()
    assert fresh().run(weights, 7, 1e-2, kept=kept, until=0.0) is None  # in another process
    assert stopped.run(weights, 7, 1e-2, kept=kept) == losses and not kept.exists()
    assert stopped.run(weights, 7, 1e-2) == losses  # and once more, with the same optimizer
    for name, value in straight.student.state_dict().items():
        assert torch.equal(value, stopped.student.state_dict()[name]), name
    assert stopped.run(weights, 8, 1e-2) != losses  # another order of the text


def test_the_order_visits_every_block_before_any_twice() -> None:
    order = order_of_blocks(7, steps=5, batch=2, seed=1).flatten().tolist()
    assert sorted(order[:7]) == list(range(7)) and len(set(order[7:])) == 3


def test_a_run_that_cannot_end_in_time_is_not_begun(modules: ModuleType) -> None:
    pace = importlib.import_module("experiments.worker").Pace()
    assert pace.expected(100) == 0.0  # the first run is always begun
    pace.took(10, training=5.0, after=2.0)
    assert pace.expected(100) == 52.0


def test_processes_take_the_gpus_in_turn(modules: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command, processes, rows = (importlib.import_module(f"experiments.{n}") for n in ("command", "processes", "rows"))
    taken: list[str] = []

    class Fake:
        def __init__(self, command: list[str], *, env: dict[str, str], **_: Any) -> None:
            taken.append(env["CUDA_VISIBLE_DEVICES"])

        def poll(self) -> int | None:
            return 0 if len(taken) == 3 else None

        returncode = 0

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    monkeypatch.setattr(processes.subprocess, "Popen", Fake)
    (tmp_path / "logs").mkdir()
    paths = ["--wikitext", str(tmp_path), "--out", str(tmp_path), "--device", "cuda", "--commit", "x"]
    with command.alone(tmp_path) as lock:
        workers = processes.Processes(command.options([*paths, "--jobs", "4"]), lock)
        for name in ("a", "b", "c"):
            workers.begin(rows.Row(name, "", "float"), "ce", 0.0)
    assert taken == ["4", "6", "4"]
    assert workers.ended() == {"a, ce": 0, "b, ce": 0, "c, ce": 0} and not workers.running


def test_results_are_of_their_texts(modules: ModuleType, inputs: Path, tmp_path: Path) -> None:
    command, setting = (importlib.import_module(f"experiments.{n}") for n in ("command", "setting"))
    text, out, wikitext = tmp_path / "other.txt", tmp_path / "out", tmp_path / "wikitext"
    out.mkdir()
    shutil.copytree(inputs / "wikitext", wikitext)
    pages = (inputs / "text.txt").read_text()
    text.write_text(pages)

    def made(*more: str) -> Any:
        return setting.Setting(command.options([*arguments(inputs, out), "--wikitext", str(wikitext), *more]), "dense")

    first = made()
    first.tokenise()
    assert made("--text", str(text)).settings == first.settings  # the same text by another name
    assert made("--text").settings == first.settings  # what OUT holds
    text.write_text(pages.replace("cat", "mat"))
    other = made("--text", str(text))
    assert other.settings != first.settings
    assert not torch.equal(other.corpus["train"], first.corpus["train"])
    with pytest.raises(ValueError, match="holds tokens or runs of 2 texts"):
        made("--text")
    validation = wikitext / "validation.jsonl"
    validation.write_text(validation.read_text().replace("dogs", "cats"))
    changed = made()
    assert changed.settings != first.settings
    assert not torch.equal(changed.corpus["validation"], first.corpus["validation"])
    for path in out.glob("corpus-*"):
        path.unlink()
    with pytest.raises(ValueError, match="--text is needed"):
        made("--text")
    other.records.add(importlib.import_module("experiments.records").Run("a", "ptq"), {"word_perplexity": 1.0})
    validation.write_text((inputs / "wikitext" / "validation.jsonl").read_text())
    assert made("--text").settings == other.settings  # a table of the runs alone


def test_a_stopped_run_is_taken_up_by_the_same_alone(modules: ModuleType, inputs: Path, tmp_path: Path) -> None:
    command, setting, worker, records, rows = (
        importlib.import_module(f"experiments.{n}") for n in ("command", "setting", "worker", "records", "rows")
    )
    text = inputs / "text.txt"
    row, run = rows.Row("a", "", "aoquant", "mxfp4"), records.Run("a", "qat", "kl", 1e-3, 0)

    def name(row: Any, *more: str) -> str:
        made = setting.Setting(command.options([*arguments(inputs, tmp_path), *more]), "dense")
        return str(worker.state_file(made, row, run))

    again = [name(row), name(row), name(dataclasses.replace(row, about="x", seeds=7))]
    others = [name(row, "--tokens", "1024"), name(row, "--text", str(text), str(text))]
    others += [name(dataclasses.replace(row, trick="soft")), name(dataclasses.replace(row, recipe="nvfp4"))]
    assert len({*again}) == 1 and len({*again, *others}) == 5


def test_a_state_of_another_length_is_refused(modules: ModuleType, inputs: Path, tmp_path: Path) -> None:
    tuning, students, rows = (importlib.import_module(f"experiments.{n}") for n in ("tuning", "students", "rows"))
    blocks = torch.arange(12 * 8).view(12, 8) % 31
    float_model = LlamaForCausalLM.from_pretrained(inputs / "model", dtype=torch.bfloat16)
    student = students.Student(rows.Row("r", "", "float"), float_model, blocks)
    weights, kept = student.prepared(0).state_dict(), tmp_path / "kept.pt"
    tune = tuning.FineTune(student.prepared(0), None, blocks, tuning.Budget(40, 2, 8), compile=False, graph=False)
    assert tune.run(weights, 0, 1e-3, kept=kept, until=0.0) is None
    with pytest.raises(ValueError, match="must be of a run of 10 steps, got 40"):
        tune.run(weights, 0, 1e-3, steps=10, kept=kept)


def test_an_end_by_signal_ends_the_workers_and_one_call_has_the_folder(
    modules: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command, processes, rows = (importlib.import_module(f"experiments.{n}") for n in ("command", "processes", "rows"))
    began: list[subprocess.Popen[bytes]] = []
    Popen = subprocess.Popen

    def begin(_: list[str], **how: Any) -> Any:
        began.append(Popen(["sh", "-c", "sleep 60 & wait"], **how))  # a worker with a process of its own
        return began[0]

    def stop(*_: Any) -> None:
        with pytest.raises(ValueError, match="is in use by another call"), command.alone(tmp_path):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(command, "chosen", lambda o: {})
    monkeypatch.setattr(command, "tasks", lambda o, rows_, settings: [(rows.Row("a", "", "float"), "ce")])
    monkeypatch.setattr(processes.subprocess, "Popen", begin)
    monkeypatch.setattr(command.time, "sleep", stop)
    paths = ["--wikitext", str(tmp_path), "--out", str(tmp_path), "--device", "cpu", "--commit", "x"]
    monkeypatch.setattr(sys, "argv", ["experiments", *paths])
    before = signal.signal(signal.SIGTERM, lambda *_: began[0].kill())  # without a handler of its own the test fails
    try:
        with pytest.raises(SystemExit) as ended:
            command.start(0.0)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 128 + signal.SIGTERM and began[0].returncode == -signal.SIGKILL
    for _ in range(1000):  # its sleep is killed too, and holds the lock until it has ended
        with suppress(ValueError), command.alone(tmp_path):
            break
        threading.Event().wait(0.01)
    else:
        pytest.fail("a process of the worker's is left and holds the folder")


def test_the_rows_of_the_table_can_be_made(modules: ModuleType) -> None:
    rows = importlib.import_module("experiments.rows")
    found = rows.load_all()
    assert sum(row.headline for row in found.values()) == 8
    assert {row.seeds for row in found.values() if row.headline} == {5}
    assert next(iter(found.values())).kind == "float"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('about = "x"\nkind = "aoquant"\nrecipe = "nvfp5"', "no recipe is called 'nvfp5'"),
        ('about = "x"\nkind = "other"', "kind must be one of float"),
        ('about = "x"\nkind = "float"\nrates = [1]', "no key rates"),
        ('about = "x"\nkind = "torchao"\nrecipe = "int5"', "recipe must be one of torchao's"),
        ('about = "x"\nkind = "float"\nagainst = "nothing"', "against names no row"),
    ],
)
def test_a_row_that_is_wrong_is_refused(modules: ModuleType, tmp_path: Path, text: str, said: str) -> None:
    rows = importlib.import_module("experiments.rows")
    (tmp_path / "row.toml").write_text(text)
    with pytest.raises(ValueError, match=said):
        rows.load_all(tmp_path)
