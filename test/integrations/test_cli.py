"""The command line, on the embedded model with a budget of two steps: every stage, every file, and errors of one line."""

from __future__ import annotations

import csv
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from aoquant import cli
from aoquant.formats import COMPOSED
from aoquant.integrations import job
from aoquant.integrations.lm_eval import Perplexity

SMALL = ["--steps", "2", "--batch-size", "2", "--block", "64", "--limit", "1", "--window", "256", "--device", "cpu"]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that one small run wrote."""
    folder = tmp_path_factory.mktemp("run") / "out"
    cli.main(["run", "--recipe", "int4-g32", "--out", str(folder), *SMALL])
    return folder


def test_run_writes_everything_and_verifies(out: Path) -> None:
    numbers = json.loads((out / job.RESULTS).read_text())
    assert [s["name"] for s in numbers["stages"]] == [
        "float",
        "float, fine-tuned",
        "PTQ",
        "QAT, prepared",
        "QAT, converted",
    ]
    words = [s["perplexity"]["word_perplexity"] for s in numbers["stages"]]
    assert len(set(words[:4])) == 4  # each stage is another model
    assert words[3] == words[4]  # but for conversion, which changes nothing
    assert words[2] > words[0]
    assert numbers["min_sqnr_db"] == "inf"
    assert numbers["stages"][4]["bytes"] < 0.7 * numbers["stages"][0]["bytes"]
    text = (out / "report.md").read_text()
    assert "int4-g32" in text
    assert "recovered by QAT: n/a" in text  # a single document
    assert "logits bit-equal" in text
    rows = list(csv.DictReader((out / "report.csv").open()))
    assert len(rows) == 4 * 7 + 1  # seven linears in each of four blocks, and the model's output
    for folder in (out, out / "float_against_quantized"):
        assert json.loads((folder / "report.json").read_text())
        assert (folder / "report.png").stat().st_size > 10_000


@pytest.mark.slow
def test_run_with_embeddings_quantises_the_tied_pair(out: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    cli.main(["run", "--recipe", "int4-g32", "--embeddings", "--out", str(folder), *SMALL])
    with_them, without = (json.loads((f / job.RESULTS).read_text())["stages"] for f in (folder, out))
    assert with_them[3]["perplexity"]["word_perplexity"] == with_them[4]["perplexity"]["word_perplexity"]
    assert with_them[4]["bytes"] < 0.6 * without[4]["bytes"]
    rows = list(csv.DictReader((folder / "report.csv").open()))
    assert len(rows) == 4 * 7 + 2 + 1
    assert {r["output_sqnr_db"] for r in rows} == {"inf"}
    assert "logits bit-equal" in (folder / "report.md").read_text()


def test_eval_loads_the_checkpoint_bit_equal(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["eval", str(out / "checkpoint"), "--limit", "1", "--window", "256", "--device", "cpu"])
    printed = capsys.readouterr().out
    assert "logits bit-equal to the run that wrote it" in printed
    stored = json.loads((out / job.RESULTS).read_text())["stages"][4]["perplexity"]["word_perplexity"]
    assert f"word perplexity {stored:.4f}" in printed


def test_eval_notices_another_model(out: Path) -> None:
    _, model = job.load_checkpoint(out / "checkpoint", "cpu")
    with torch.no_grad():
        model.model.norm.weight[0] += 1
    assert "differ" in job.check_fingerprint(model, out / "checkpoint")


def test_float_checkpoints_are_scored_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["eval", str(job.assets()), "--limit", "1", "--window", "256", "--device", "cpu"])
    assert "no fingerprint" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--recipe", "int4-g31"], r"no recipe is called 'int4-g31'; near it: int4-g"),
        (["run", "--dtype", "int8"], "dtype must be"),
        (["run", "--loss", "mse"], "loss must be one of kl, ce"),
        (["run", "--steps", "0"], "steps"),
        (["run", "--out", "{full}"], "is not an empty folder"),
        (["run", "--wikitext", "{full}"], "test.jsonl"),
        (["run", "--model", "/nowhere"], "model must be a folder that exists"),
        (["run", "--device", "tpu"], "device must be one that torch finds"),
        (["run", "--limit", "0"], "limit and window must be at least 1"),
        (["run", "--train-text", "nowhere.txt"], "missing: nowhere.txt"),
        (["eval", "{full}"], "config.json"),
        (["formates"], "no command is called 'formates'"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_mistakes_are_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").write_text("here")
    with pytest.raises(SystemExit) as exit:
        cli.main([a.format(full=full) for a in arguments])
    assert exit.value.code == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("aoquant: ")
    assert message in error


def test_formats_recipes_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("formats", "recipes", "doctor"):
        cli.main([command])
    printed = capsys.readouterr().out
    for word in ("nvfp4-none", "int8-int4", "torch._scaled_mm", "bit-equal", *COMPOSED):
        assert word in printed
    assert "DIFFERENT" not in printed
    table = printed.split("names that are put together")[0]
    said = {line.split("|")[1].strip(): line.split("|")[-2].strip() for line in table.splitlines() if "|" in line}
    assert (said["nvfp4"], said["nvfp4-row"], said["nvfp4-static:0.001"], said["fp8-tensor"]) == (
        "no",
        "yes",
        "yes",
        "no",
    )


def perplexity(*nats: float) -> Perplexity:
    rest: Any = dict.fromkeys(("window", "documents", "limit", "batch_size"), 1)
    texts: Any = dict.fromkeys(("source", "task", "task_version"), "")
    value = math.exp(-sum(nats) / (10 * len(nats)))
    words = (10,) * len(nats)
    return Perplexity(
        word_perplexity=value, byte_perplexity=1, bits_per_byte=1, loglikelihoods=nats, words=words, **rest, **texts
    )


def test_recovered_share() -> None:
    base, ptq = perplexity(-40.0, -41.0, -42.0), perplexity(-44.0, -45.1, -46.0)
    half = perplexity(-42.0, -43.05, -44.0)
    assert job.recovered(base, ptq, half).startswith("50 % of PTQ's loss (0.4033 +-")
    assert job.recovered(perplexity(-40.0), perplexity(-44.0), perplexity(-42.0)).startswith("n/a (one document")
    noise = perplexity(-40.5, -40.6, -42.4)
    assert job.recovered(base, noise, half).startswith("n/a (PTQ loses 0.0167")


def test_python_m_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "aoquant", "quantise"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "no command is called 'quantise'" in done.stderr
