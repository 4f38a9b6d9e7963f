"""The pages of the experiments say what the committed runs say."""

from __future__ import annotations

import csv
import importlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from support.experiments import ROOT, experiments_modules

modules = pytest.fixture(experiments_modules)
RESULTS = ROOT / "benchmarks" / "results"


def test_the_page_has_the_seconds_of_the_committed_runs(modules: ModuleType, tmp_path: Path) -> None:
    durations = importlib.import_module("experiments.durations").durations
    assert f"\n{durations(RESULTS)}\n" in (ROOT / "docs" / "evidence" / "experiments.md").read_text(encoding="utf-8")

    def line(row: str, loss: str, seconds: float) -> str:
        run = {"row": row, "stage": "qat", "loss": loss, "rate": 1.0, "seed": 0}
        return json.dumps({"run": run, "result": {"train_seconds": seconds, "score_seconds": seconds / 2}})

    taken = [("a", "kl", 4.0), ("b", "kl", 6.0), ("torchao-a", "kl", 10.0), ("a", "ce", 2.0)]
    (tmp_path / "experiments_runs.jsonl").write_text("\n".join(line(*what) for what in taken))
    cells = "4.0 to 6.0 | 10.0 to 10.0 | 1.0 to 5.0"
    assert durations(tmp_path).splitlines()[2:] == [
        f"| [main](../../benchmarks/results/experiments_runs.jsonl) | {cells} |"
    ]


def test_the_page_has_the_distances_of_the_committed_checks(modules: ModuleType, tmp_path: Path) -> None:
    checked = importlib.import_module("experiments.checked").checked
    assert f"\n{checked(RESULTS)}\n" in (ROOT / "docs" / "evidence" / "experiments.md").read_text(encoding="utf-8")

    def line(row: str, stage: str, **result: float) -> str:
        run = {"row": row, "stage": stage, "loss": "kl", "rate": 1.0, "seed": 0}
        return json.dumps({"run": run, "result": result})

    made = [line(row, "qat", word_perplexity=10.0) for row in ("int4-g32", "int4-g128", "mxfp4")]
    made += [
        line("int4-g32", "checks", cpu_nats_a_word=0.001),
        line("int4-g128", "checks", cpu_nats_a_word=0.002),
        line("mxfp4", "checks", cpu_nats_a_word=0.03, transformers_word_perplexity=9.9),
    ]
    (tmp_path / "experiments_runs.jsonl").write_text("\n".join(made))
    cells = "2, at most 0.0020 | 1, at most 0.0300 | | 1, at most 0.0101"
    assert checked(tmp_path).splitlines()[2:] == [
        f"| [main](../../benchmarks/results/experiments_runs.jsonl) | {cells} |"
    ]


def test_the_page_compares_the_losses_of_the_committed_runs(modules: ModuleType) -> None:
    losses, table, rows = (importlib.import_module(f"experiments.{n}") for n in ("losses", "table", "rows"))
    assert f"\n{losses.published(RESULTS)}\n" in (ROOT / "docs" / "evidence" / "experiments.md").read_text(
        encoding="utf-8"
    )

    def line(name: str, loss: str, runs: dict[int, tuple[float, float]]) -> object:
        found = {s: {"word_perplexity": p, "validation_loss": v} for s, (p, v) in runs.items()}
        return table.Line(every[name], loss, 1e-4, 50.0, 70.0, found)

    every = rows.load_all()
    made = [
        line("nvfp4", "kl", {0: (52.0, 3.0), 1: (54.0, 3.2), 2: (99.0, 9.0)}),
        line("nvfp4", "ce", {0: (55.0, 3.25), 1: (57.0, 3.25)}),
        line("fp8", "kl", {0: (52.0, 3.0)}),  # by one loss alone
        line("nvfp4-average", "kl", {0: (52.0, 3.0)}),
        line("nvfp4-average", "ce", {0: (52.0, 3.0)}),  # a trick
        line("torchao-fp8", "kl", {0: (52.0, 3.0)}),
        line("torchao-fp8", "ce", {0: (52.0, 3.0)}),  # not aoquant's
        line("mxfp4", "kl", {0: (52.0, 3.0), 1: (54.0, 3.0)}),
        line("mxfp4", "ce", {0: (53.0, 2.9), 1: (55.0, 2.9001)}),
    ]
    assert losses.page(made).splitlines()[2:] == [
        "| `nvfp4` | 70.00 | 56.00 | 53.00 | 2 | +0.1500 ± 1.2706 | |",
        "| `mxfp4` | 70.00 | 54.00 | 53.00 | 2 | -0.0999 ± 0.0006 | cross entropy |",
    ]


@pytest.mark.parametrize("name", ["torchao_by_cross_entropy", "tricks_page"])
def test_the_page_has_the_tables_of_the_committed_runs(modules: ModuleType, name: str) -> None:
    made = importlib.import_module(f"experiments.{name}").published(RESULTS)
    assert f"\n{made}\n" in (ROOT / "docs" / "evidence" / "experiments.md").read_text(encoding="utf-8")


def test_torchaos_rows_by_cross_entropy_have_both_of_their_scores(modules: ModuleType) -> None:
    page, table, rows = (
        importlib.import_module(f"experiments.{n}") for n in ("torchao_by_cross_entropy", "table", "rows")
    )
    every = rows.load_all()

    def line(name: str, loss: str, scores: dict[int, tuple[float, float]]) -> object:
        """scores: by seed, of the converted and of the prepared model."""
        runs = {s: {"word_perplexity": c, "prepared_word_perplexity": p} for s, (c, p) in scores.items()}
        return table.Line(every[name], loss, 1e-4, 50.0, 70.0, runs)

    made = [
        line("int4-g128", "ce", {0: (60.0, 60.0), 1: (61.0, 61.0)}),
        line("torchao-int4-g128", "ce", {0: (66.0, 63.0)}),
        line("fp8", "ce", {0: (52.0, 52.0)}),  # torchao's by distillation alone
        line("torchao-fp8", "kl", {0: (52.0, 52.0)}),
        line("nvfp4", "ce", {0: (53.0, 53.0)}),  # none of torchao's beside it
        line("int8-int4", "ce", {0: (60.0, 60.0), 1: (66.0, 66.0)}),
        line("torchao-int8-int4", "ce", {0: (60.0, 60.0), 1: (66.0, 66.0)}),
        line("int4-g32", "ce", {0: (60.0, 60.0)}),
        replace(line("torchao-int4-g32", "ce", {0: (61.0, 61.0)}), as_prepared="no kernel"),
    ]
    assert page.page(made).splitlines()[2:] == [
        "| `int4-g128` | 60.50 ± 0.71 | 2 | 63.00 | 66.00 | 1 | -0.0953 (one seed) |",
        "| `int8-int4` | 63.00 ± 4.24 | 2 | 63.00 | 63.00 ± 4.24 | 2 | +0.0000 ± 0.0000, 2 seeds: not told apart |",
        "| `int4-g32` | 60.00 | 1 | 61.00 | | 1 | |",
    ]


def test_a_prepared_and_a_converted_score_are_not_put_together(modules: ModuleType) -> None:
    """torchao's PTQ may be scored as prepared, and its QAT, with another package at hand, as converted."""
    table, rows, records = (importlib.import_module(f"experiments.{n}") for n in ("table", "rows", "records"))
    row = rows.load_all()["torchao-int4-g32"]
    run, ptq = records.Run(row.name, "qat", "ce", 1e-4), records.Run(row.name, "ptq")
    scored = {"word_perplexity": 60.0, "validation_loss": 3.0}
    for of_ptq, of_run, lost, said in (
        ({"as_prepared": "no kernel"}, {}, None, ""),
        ({}, {}, 60.0, ""),
        ({"as_prepared": "no kernel"}, {"as_prepared": "no kernel"}, 60.0, "no kernel"),
    ):
        found = {
            table.float_run(row): scored,
            ptq: {**scored, **of_ptq},
            run: {**scored, **of_run},
        }
        (line,) = (made for made in table.lines({row.name: row}, found) if made.loss == "ce")
        assert (line.ptq, line.as_prepared) == (lost, said)


def test_a_trick_is_shown_beside_the_row_without_it(modules: ModuleType, tmp_path: Path) -> None:
    tricks_page = importlib.import_module("experiments.tricks_page")
    heads = "row,against,trick,QAT,\"validation, log less the other's\",log perplexity less the other's\n"
    won, lost = "-0.0030 ± 0.0010, 3 seeds: better", "+0.0001 ± 0.0020, 3 seeds: not told apart"
    (tmp_path / "experiments.csv").write_text(
        f'{heads}nvfp4,,,52.0,,\nnvfp4-soft,nvfp4,soft,51.0,"{won}","nvfp4: {lost}"\nnvfp4-average,nvfp4,average,,,\n'
    )
    (tmp_path / "experiments_earlier.csv").write_text(
        f"{heads}nvfp4-average,nvfp4,average,51.0,+0.0010 (one seed),nvfp4: -0.0002 (one seed)\n"
    )
    assert tricks_page.published(tmp_path).splitlines()[2:] == [
        "| `nvfp4-soft` | `nvfp4` | -0.0030 ± 0.0010, 3 seeds: better | +0.0001 ± 0.0020, 3 seeds | | |",
        "| `nvfp4-average` | `nvfp4` | | | +0.0010 (one seed) | -0.0002 (one seed) |",
    ]


@pytest.mark.parametrize("name", ["experiments", "experiments_earlier", "experiments_moe"])
def test_the_committed_runs_make_the_committed_table(modules: ModuleType, tmp_path: Path, name: str) -> None:
    shutil.copyfile(RESULTS / f"{name}_runs.jsonl", tmp_path / "runs.jsonl")
    command = importlib.import_module("experiments.command")
    command.main(command.options(["--out", str(tmp_path), "--table", "--commit", "abc"]))
    assert (tmp_path / "results.csv").read_text() == (RESULTS / f"{name}.csv").read_text()
    assert (tmp_path / "results.md").read_text() == (RESULTS / f"{name}.md").read_text()


def test_the_documented_commands_run_the_rows_of_the_committed_tables(modules: ModuleType) -> None:
    command, known = (importlib.import_module(f"experiments.{name}") for name in ("command", "known"))
    page = (ROOT / "docs" / "evidence" / "experiments.md").read_text(encoding="utf-8").partition("## Repeat it")[2]
    lines = page.partition("```sh")[2].partition("```")[0].replace("\\\n", " ").splitlines()
    commands = [line.split()[2:] for line in lines if line.startswith("python eval/experiments ")]
    tables = {"OUT": "experiments", "OUT2": "experiments_earlier", "OUT3": "experiments_moe"}
    trained = {name: set[tuple[str, str]]() for name in tables.values()}
    for given in commands:
        o = command.options([*given, "--commit", "abc"])
        name = tables[str(o.out)]
        runs = [json.loads(line) for line in (RESULTS / f"{name}_runs.jsonl").read_text().splitlines()]
        assert all(known.of_options(o).items() <= run["settings"].items() for run in runs)
        rows = command.chosen(o).values()
        trained[name] |= {(r.name, loss) for r in rows for loss in r.losses if loss in o.losses or r.kind == "float"}
    for name, documented in trained.items():
        runs = [json.loads(line) for line in (RESULTS / f"{name}_runs.jsonl").read_text().splitlines()]
        found = {(run["run"]["row"], run["run"]["loss"]) for run in runs if run["run"]["stage"] == "qat"}
        assert found <= documented
        with (RESULTS / f"{name}.csv").open(encoding="utf-8", newline="") as file:
            assert {row["row"] for row in csv.DictReader(file)} <= {row for row, _ in documented}
