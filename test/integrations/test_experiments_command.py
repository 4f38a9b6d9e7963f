"""The experiments' command line: what it refuses, what it says, and which table it writes."""

from __future__ import annotations

import importlib
import signal
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import pytest
from support.experiments import ROOT, arguments, experiments_inputs, experiments_modules

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
