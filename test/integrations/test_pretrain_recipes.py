"""The comparison of training recipes: variants of a seed share weights and data, differences are theirs, a stopped run
goes on.
"""

import argparse
import csv
import importlib
import json
import random
import subprocess
import sys
from pathlib import Path
from statistics import mean
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
SMALL = [
    "vocab=300", "hidden=128", "intermediate=128", "layers=1", "heads=2", "kv_heads=1", "window=16", "batch=2", "lr=0.01", "log_every=1",
]  # fmt: skip


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def recipes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for folder in ("eval", "benchmarks"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    return importlib.import_module("pretrain_recipes")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    draw, path = random.Random(0), tmp_path / "text.txt"
    documents = [" ".join(draw.choices(["the", "cat", "sat", "on", "a", "mat"], k=30)) for _ in range(40)]
    path.write_text("\n<|endoftext|>\n".join(documents), encoding="utf-8")
    return path


def options(text: Path, out: Path) -> argparse.Namespace:
    out.mkdir()
    return argparse.Namespace(
        text=[text], validation=[text], out=out, steps=8, set=SMALL, device="cpu", seeds=2, jobs=1
    )


@pytest.mark.slow
def test_a_call_leaves_a_row_for_each_validation_and_a_second_call_has_nothing_to_do(
    recipes: ModuleType, text: Path, tmp_path: Path
) -> None:
    """As a user calls it: two processes at once, one table."""
    out = tmp_path / "out"
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "pretrain_recipes.py"),
        "--text",
        str(text),
        "--validation",
        str(text),
    ]
    command += ["--out", str(out), "--variants", "bf16", "bf16, again", "--seeds", "1", "--steps", "8", "--jobs", "2"]
    command += ["--device", "cpu", "--set", *SMALL]
    printed = [subprocess.run(command, check=True, capture_output=True, text=True).stdout for _ in range(2)]
    lines = [[line for line in text.splitlines() if not line.startswith("date ")] for text in printed]
    assert lines[0] == lines[1]
    assert f"--variants bf16 'bf16, again' --set {SMALL[0]}" in printed[0] and str(tmp_path) not in printed[0]
    with (out / "pretrain_recipes.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(r["variant"], r["step"], r["tokens"]) for r in rows] == [
        (name, str(step), str(step * 2 * 16)) for name in ("bf16", "bf16, again") for step in (2, 4, 6, 8)
    ]
    assert float(rows[3]["held_out_loss"]) < float(rows[0]["held_out_loss"])
    again = next(line for line in printed[0].splitlines() if line.startswith("bf16, again"))
    assert "+0.0000" in again  # a CPU adds in one order


@pytest.mark.slow
def test_a_run_that_was_stopped_ends_as_if_it_had_not_been(
    recipes: ModuleType, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, rows = recipes.Run("quartet2", 1), []
    for name, halves in (("straight", [{}]), ("halves", [{"stop_at": 5}, {}])):
        o = options(text, tmp_path / name)
        recipes.corpus(o)
        for change in halves:
            monkeypatch.setitem(recipes.VARIANTS, "quartet2", {"recipe": "quartet2"} | change)
            recipes.work(o, run)
        rows.append(recipes.read(o, [run]))
        rows[-1][-1]["seconds"] = 0
        assert (run.folder(o) / "checkpoint.pt").exists()
    assert [r["step"] for r in rows[0]] == [2, 4, 6, 8]
    assert str(rows[0]) == str(rows[1])  # nan is nan


@pytest.mark.parametrize("variant", ["bf16", pytest.param("quartet", marks=pytest.mark.slow)])
def test_a_model_trained_again_is_as_good_as_new(recipes: ModuleType, text: Path, tmp_path: Path, variant: str) -> None:
    """A process trains all seeds of a variant with one model: nothing of the seed before is left in it."""
    ends = []
    for name, before in (("new", None), ("again", recipes.Run(variant, 0))):
        o = options(text, tmp_path / name)
        recipes.corpus(o)
        model = None if before is None else recipes.work(o, before)
        ends.append(dict(recipes.work(o, recipes.Run(variant, 1), model).state_dict()))
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(value, ends[1][key]) for key, value in ends[0].items())


def test_variants_of_a_seed_begin_with_the_same_weights_and_read_the_same_text(
    recipes: ModuleType, text: Path, tmp_path: Path
) -> None:
    pretrain = importlib.import_module("pretrain")
    o, ids = options(text, tmp_path / "out"), torch.arange(1000)
    found: dict[Any, Any] = {}
    for seed in (0, 1):
        for variant, changes in recipes.VARIANTS.items():
            config = pretrain.Config(
                text=(text,), out=tmp_path, seed=seed, device="cpu", **recipes.settings(o), **changes
            )
            model = pretrain.build_model(config)
            data = argparse.Namespace(ids=ids, main=len(ids))
            found[seed, variant] = dict(model.named_parameters()), pretrain.batch_at(config, data, 3)
    for variant in recipes.VARIANTS:
        for seed in (0, 1):
            weights, batch = found[seed, variant]
            assert all(torch.equal(w, found[seed, "bf16"][0][name]) for name, w in weights.items())
            assert torch.equal(batch, found[seed, "bf16"][1])
        assert not torch.equal(found[0, variant][1], found[1, variant][1])


def test_differences_are_taken_seed_by_seed(recipes: ModuleType) -> None:
    """Seeds far apart, variants .1, .2 and .3 apart within them: .2, and .0577 = sqrt(.01 / 3) its standard error."""
    losses = {"bf16": (3.0, 4.0, 5.0), "quartet": (3.1, 4.2, 5.3), "nvfp4": (3.5,)}
    rows = [
        {"variant": name, "seed": seed, "held_out_loss": loss}
        for name, values in losses.items()
        for seed, loss in enumerate(values)
    ]
    assert recipes.difference(rows, "quartet", "bf16") == "+0.2000 +- 0.0577"
    assert recipes.difference(rows, "nvfp4", "bf16") == "+0.5000"
    assert recipes.difference(rows, "gridflip", "bf16") == ""
    assert mean(losses["quartet"]) - mean(losses["bf16"]) == pytest.approx(0.2)


def test_the_table_has_what_ended_and_what_is_on_the_way(recipes: ModuleType, text: Path, tmp_path: Path) -> None:
    o = options(text, tmp_path / "out")
    torch.save({"bytes": 300, "validation": torch.zeros(100)}, o.out / "corpus.pt")
    runs = [recipes.Run("bf16", 0), recipes.Run("nvfp4", 0)]
    for run, bits in zip(runs, (1.0, 1.5), strict=True):
        run.folder(o).mkdir()
        (run.folder(o) / "validation.jsonl").write_text(json.dumps({"step": 4, "bits_per_byte": 2 * bits}))
    done = {"step": 8, "bits_per_byte": 1.0, "train_loss": 2.0, "seconds": 1.0}
    (runs[0].folder(o) / "row.json").write_text(json.dumps(done))
    rows = recipes.read(o, runs)
    assert [(r["variant"], r["step"], r["tokens"], r["bits_per_byte"]) for r in rows] == [
        ("bf16", 4, 128, 2.0), ("bf16", 8, 256, 1.0), ("nvfp4", 4, 128, 3.0),
    ]  # fmt: skip
    assert rows[1]["held_out_loss"] == pytest.approx(3 * 0.693147, abs=1e-5)  # three bytes a token
    lines = recipes.table(rows).splitlines()
    assert lines[1].startswith("bf16") and lines[2] == ""  # nvfp4 has not ended
    assert lines[-2].split() == ["128", "nvfp4", "+2.0794"]
