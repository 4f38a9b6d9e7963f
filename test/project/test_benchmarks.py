"""Smoke tests of benchmarks/: each program runs on a CPU and writes its rows, and the pages hold what its files say."""

from __future__ import annotations

import csv
import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import forked

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
LATE = "not run: out of time"


def ran(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a benchmark on its smallest sizes, in a process of its own."""
    return forked.script(ROOT / "benchmarks" / script, "--quick", *arguments)


def rows(file: Path) -> list[dict[str, str]]:
    with file.open(newline="", encoding="utf-8") as opened:
        return list(csv.DictReader(opened))


def alone(*command: str) -> list[dict[str, str]]:
    """Return the rows that a command prints, in a process with one thread whose clock does not count its neighbours."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    return list(csv.DictReader(line for line in done.stdout.splitlines() if line and not line.startswith("#")))


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a module of benchmarks/ or eval/ by its name."""
    for folder in ("benchmarks", "eval"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    return importlib.import_module


COMPARED = ("--only", "int4-g128", "--turns", "1")


@pytest.mark.parametrize(
    ("command", "name", "count"),
    [
        (["host.py", "--recipes", "int4-g128"], "host.csv", 12),
        pytest.param(["moe.py", "--recipes", "nvfp4"], "moe.csv", 20, marks=pytest.mark.slow),
        pytest.param(
            ["compare.py", str(ROOT), "host", *COMPARED, "--slack", "50"], "host.csv", 8, marks=pytest.mark.slow
        ),
        pytest.param(
            ["compare.py", str(ROOT), "graph", "generate", "experts", *COMPARED, "--slack", "50"],
            "all.csv",
            7,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["host", "moe", "compare-host", "compare-all"],
)
def test_a_benchmark_writes_its_rows(command: list[str], name: str, count: int, tmp_path: Path) -> None:
    done = ran(*command, "--out", str(tmp_path / name))
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    found = rows(tmp_path / name)
    assert len(found) == count
    for row in found:
        numbers = [row[key] for key in ("us", "ms", "old", "new") if key in row]
        assert numbers and all(float(number) > 0 for number in numbers) and not row.get("note"), row


@pytest.mark.slow
def test_calibrated_ptq_has_its_cost(tmp_path: Path) -> None:
    done = ran("ptq_cost.py", "--gram", "--out", str(tmp_path / "cost.csv"))
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    (row,) = rows(tmp_path / "cost.csv")
    assert row["recipe"] == "int4-g128" and 0 < float(row["ratio"]) < 1 and float(row["s_per_billion"]) > 0


@pytest.mark.slow
def test_every_part_of_a_model_has_its_rows(tmp_path: Path) -> None:
    done = ran("model.py", "--recipes", "int4-g128", "--torchao", "int4", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    for part, hows in (("train", 2), ("generate", 2), ("prefill", 1)):
        found = rows(tmp_path / f"model_{part}.csv")
        assert [row["variant"] for row in found] == ["bf16", "int4-g128", "torchao:int4"] * hows
        for row in found:
            deploys = part != "train" and row["variant"] == "torchao:int4"  # its kernel is MSLK's, for GPUs
            assert bool(row["note"]) == deploys and (deploys or float(row["ms"]) > 0)
    assert ran("model.py", "--torchao", "int5").returncode == 2


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["8b", "30b-a3b", "stopped"])
def test_a_large_run_has_a_row_for_each_stage(shape: str, tmp_path: Path) -> None:
    done = ran("large_run.py", shape, "--steps", "3", "--work", str(tmp_path), "--out", str(tmp_path / "large.csv"))
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    found = rows(tmp_path / "large.csv")
    assert [row["tokens_per_s"] != "" for row in found] == [False, True, False, True, False, False]
    assert "inf dB" in found[-1]["note"] and "bit-equal" in found[-1]["note"]
    assert all(float(row["seconds"]) > 0 for row in found)


@pytest.mark.slow
def test_a_gemma_trains_by_the_loss_of_a_run(tmp_path: Path) -> None:
    done = ran("model.py", "train", "--gemma", "--recipes", "int4-g128", "--torchao", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    found = rows(tmp_path / "model_train.csv")
    assert [row["variant"] for row in found] == ["bf16", "int4-g128"] * 2
    assert all(float(row["ms"]) > 0 and not row["note"] for row in found)


def test_every_variant_has_a_row_when_time_ends(tmp_path: Path) -> None:
    more = ["--recipes", "int4-g128", "fp8", "--torchao", "int4", "--how", "eager", "reduce-overhead"]
    done = ran("model.py", "generate", *more, "--batch", "1", "2", "--limit", "0.0001", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    found = [(row["how"], row["batch"], row["variant"], row["note"]) for row in rows(tmp_path / "model_generate.csv")]
    variants = ("bf16", "int4-g128", "fp8", "torchao:int4")
    assert found == [(h, b, v, LATE) for h in ("eager", "reduce-overhead") for b in "12" for v in variants]


@pytest.mark.slow
def test_a_row_that_got_slower_fails_the_comparison(tmp_path: Path) -> None:
    """This checkout with itself, under a slack that every row exceeds."""
    out = tmp_path / "compare.csv"
    assert ran("compare.py", str(ROOT), "host", *COMPARED, "--slack", "-0.99", "--out", str(out)).returncode == 1
    assert all(row["flag"] == "SLOWER" for row in rows(out))


@pytest.mark.slow
def test_no_config_trains_slower_than_torchao_on_a_cpu() -> None:
    found = alone(str(ROOT / "benchmarks" / "cpu.py"), "--rounds", "7")
    assert len(found) == 16
    assert all(float([*row.values()][2]) > 1 for row in found)  # fake quantisation costs something


@pytest.mark.slow
def test_two_ranks_measure_their_collectives(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    alone(*torchrun, str(ROOT / "benchmarks/scaling.py"), "--hidden", "256", "--repeats", "2", "--out", str(tmp_path))
    found = rows(tmp_path / "communication.csv")
    assert [r["collective"] for r in found] == ["all_gather", "reduce_scatter"] and {r["gpus"] for r in found} == {"2"}
    assert all(float(r["GB_per_s"]) > 0 for r in found)


def test_the_pages_of_evidence_are_made_of_the_committed_files(module: Any) -> None:
    """After a new measurement: python benchmarks/publish.py"""
    publish, old = module("publish"), []
    for (name, mark), made in publish.TABLES.items():
        part = f"<!-- {mark} -->\n\n{made()}\n\n<!-- end of {mark} -->"
        old += [] if part in publish.page(name).read_text(encoding="utf-8") else [(name, mark)]
    for page, sentence in publish.sentences():
        words = " ".join((ROOT / page).read_text(encoding="utf-8").split())
        old += [] if sentence in words else [(page, sentence)]
    assert not old


def test_a_part_of_a_page_is_replaced_between_its_marks_alone(module: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- a -->\nold\n<!-- end of a -->\nafter\n", encoding="utf-8")
    module("pages").between(page, "a", "new ±")
    assert page.read_text(encoding="utf-8") == "before\n<!-- a -->\n\nnew ±\n\n<!-- end of a -->\nafter\n"
    page.write_text("<!-- end of a --> <!-- a -->", encoding="utf-8")
    with pytest.raises(ValueError, match="<!-- a -->"):
        module("pages").between(page, "a", "new")


def test_a_row_names_the_commit_and_marks_changed_files(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AOQUANT_COMMIT", raising=False)
    checkout = module("checkout")
    settings = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "a"]):
        subprocess.run(["git", "-C", str(tmp_path), *settings, *words], check=True)
    checkout.commit.cache_clear()
    head = checkout.commit(tmp_path)
    (tmp_path / "file").write_text("b")
    subprocess.run(["git", "-C", str(tmp_path), "add", "file"], check=True)
    checkout.commit.cache_clear()
    assert len(head) == 12 and checkout.commit(tmp_path) == f"{head}+dirty"


@pytest.mark.parametrize("name", ["communication", "gradients", "moe", "model_train"])
def test_a_new_row_fits_the_table_that_is_there(name: str, module: Any) -> None:
    versions = module("record_golden").versions(torch.device("cpu"))
    columns = (RESULTS / f"{name}.csv").read_text(encoding="utf-8").splitlines()[0].split(",")
    assert versions["commit"] and columns[: len(versions)] == list(versions)
