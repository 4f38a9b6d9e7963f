"""The experiments' command line: what it refuses, what it says, and which table it writes."""

from __future__ import annotations

import csv
import importlib
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import pytest
from support.experiments import ROOT, arguments, experiments_inputs, experiments_modules

from aoquant import AoquantWarning

modules = pytest.fixture(experiments_modules)
inputs = pytest.fixture(scope="module")(experiments_inputs)


EVERY_ROW = ROOT / "eval" / "experiments" / "configs"


def call(*given: str) -> None:
    main = importlib.import_module("experiments.command")
    main.main(main.options([*given, "--jobs", "0", "--commit", "abc"]))


def start(*given: str) -> None:
    """As `python eval/experiments` does: what a user can mend is one line."""
    command = importlib.import_module("experiments.command")
    handler = signal.getsignal(signal.SIGTERM)
    with patch.object(sys, "argv", ["experiments", *given]):
        try:
            command.start(0.0)
        finally:
            signal.signal(signal.SIGTERM, handler)


def test_a_call_that_leaves_runs_says_so(
    modules: ModuleType, inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for more, left in (([], 5), (["--cost"], 2)):  # bf16's one; of int4 two to search and two seeds
        with pytest.raises(SystemExit) as ended:
            call(*arguments(inputs, tmp_path / "out", "--rows", "bf16", "int4", "--limit", "1e-9", *more))
        assert ended.value.code == 3
        assert capsys.readouterr().err.endswith(f"{left} runs left: the same command goes on\n")


def test_what_cannot_be_meant_is_refused(
    modules: ModuleType, inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(more: tuple[str, ...], *, without: str = "") -> str:
        given = arguments(inputs, tmp_path / "out", "--configs", str(EVERY_ROW), *more)
        at = given.index(without) if without else 0
        with pytest.raises(SystemExit) as ended:
            start(*(given[:at] + given[at + 2 :] if without else given))
        return f"{ended.value.code} {capsys.readouterr().err}"

    assert "argument --losses: invalid choice: 'kld'" in said(("--losses", "kld"))
    assert said((), without="--model").startswith("experiments: no row has a model: give --model")
    rows = ("--rows", "moe-int4-g32-experts", "bf16")
    assert said(rows).startswith("experiments: --rows moe-int4-g32-experts needs --moe-model")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("--text nothere.txt", "experiments: --text must be files, got 'nothere.txt'"),
        ("--block 128", "experiments: --block must be at most the 64 positions of --model, got 128"),
        ("--tokens 63", "experiments: --tokens must be at least a step of --batch 2 times --block 32, got 63"),
        ("--batch 0", "argument --batch: must be a whole number of at least 1, got 0"),
        ("--block 0", "argument --block: must be a whole number of at least 1, got 0"),
        ("--tokens -5", "argument --tokens: must be a whole number of at least 1, got -5"),
        ("--seeds 0", "argument --seeds: must be a whole number of at least 1, got 0"),
        ("--search 3", "argument --search: must be a number above 0, at most 1, got 3"),
        ("--limit 0", "argument --limit: must be a number above 0, got 0"),
    ],
)
def test_what_a_user_can_mend_is_one_line(
    modules: ModuleType, inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: str, said: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        start(*arguments(inputs, tmp_path / "out", *more.split()), "--dry-run")
    message = str(ended.value.code) if isinstance(ended.value.code, str) else capsys.readouterr().err.splitlines()[-1]
    assert message.endswith(said) and "\n" not in message


def test_a_text_that_is_shorter_than_the_budget_is_told(modules: ModuleType, inputs: Path, tmp_path: Path) -> None:
    with pytest.warns(AoquantWarning, match=r"--text has 2\d+ tokens: a run of 64000 passes over it 2\d\.\d times"):
        call(*arguments(inputs, tmp_path / "out", "--tokens", "64000", "--rows", "bf16", "--tokenise"))


def recorded(inputs: Path, out: Path, *more: str) -> None:
    """Results in OUT that no run made: bf16's score, and PTQ of two rows."""
    command, records, setting = (importlib.import_module(f"experiments.{n}") for n in ("command", "records", "setting"))
    made = setting.Setting(command.options(arguments(inputs, out, "--commit", "abc", *more)), "dense")
    kept, parameters = made.records, made.parameters()
    kept.add(records.Run("bf16", "float"), {"word_perplexity": 10.0, "parameters": parameters})
    for row in ("int4", "theirs"):
        kept.add(records.Run(row, "ptq"), {"word_perplexity": 20.0})


def of_out(inputs: Path, out: Path, *more: str) -> list[str]:
    """The command line of docs/evidence/experiments.md for a table: no text, no budget."""
    given = arguments(inputs, out)
    return [*given[: given.index("--text")], "--device", "cpu", *more]


def test_a_table_takes_the_budget_that_out_has(modules: ModuleType, inputs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    recorded(inputs, out, "--search", "0.5")
    call(*of_out(inputs, out, "--table"))
    assert "'steps': 8, 'search_steps': 4, 'batch': 2, 'block': 32" in (out / "results.md").read_text()
    with pytest.raises(
        ValueError, match=r"has runs of --tokens 512 --batch 2 --block 32 --search 0\.5: give these, or"
    ):
        call(*of_out(inputs, out, "--table", "--tokens", "4096", "--batch", "4", "--block", "64"))
    with pytest.raises(
        ValueError, match=r"16 times --block 1024, got 99; --out .* has runs of --tokens 512 --batch 2 "
    ):
        call(*of_out(inputs, out, "--dry-run", "--tokens", "99"))
    recorded(inputs, out, "--tokens", "1024")
    twice = (
        r"has runs of --tokens 512 --batch 2 --block 32 --search 0\.5 and of --tokens 1024 --batch 2 --block 32: give"
    )
    with pytest.raises(ValueError, match=twice):
        call(*of_out(inputs, out, "--table"))
    call(*of_out(inputs, out, "--table", "--tokens", "1000"))
    assert "'steps': 16" in (out / "results.md").read_text()


def test_a_table_needs_out_alone(modules: ModuleType, inputs: Path, tmp_path: Path) -> None:
    out, configs = tmp_path / "out", ("--configs", str(inputs / "configs"))
    with pytest.raises(ValueError, match=r"--out must hold runs\.jsonl"):
        call("--out", str(out), "--table", *configs)
    recorded(inputs, out)
    call(*of_out(inputs, out, "--table"))
    names = ("results.csv", "results.md", "measured.csv")
    files = [(out / name).read_text() for name in names]
    assert "a Llama with 0.3 M parameters" in files[2]
    for name in names:
        (out / name).unlink()
    call("--out", str(out), "--table", *configs)
    assert [(out / name).read_text() for name in names] == files
    recorded(inputs, out, "--tokens", "1024")
    with pytest.raises(ValueError, match="has runs of 2 settings: give --model, --wikitext and the budget"):
        call("--out", str(out), "--table", *configs)
    call("--out", str(out), "--table", "--tokens", "512", *configs)


@pytest.mark.parametrize("how", [("--table",), ("--limit", "1e-9"), ("--cost", "--limit", "1e-9")])
def test_the_table_has_all_rows_whatever_is_run(
    modules: ModuleType, inputs: Path, tmp_path: Path, how: tuple[str, ...]
) -> None:
    out = tmp_path / "out"
    recorded(inputs, out)
    with pytest.raises(SystemExit) if "--limit" in how else nullcontext():
        call(*arguments(inputs, out, "--rows", "bf16", *how))
    with (out / "results.csv").open() as file:
        assert [row["row"] for row in csv.DictReader(file)] == ["bf16", "int4", "theirs"]
