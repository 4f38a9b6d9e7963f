"""The experiments' command line: what it refuses, what it says, and which table it writes."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
from support.experiments import arguments, experiments_inputs, experiments_modules

modules = pytest.fixture(experiments_modules)
inputs = pytest.fixture(scope="module")(experiments_inputs)


def call(*given: str) -> None:
    main = importlib.import_module("experiments.command")
    main.main(main.options([*given, "--jobs", "0", "--commit", "abc"]))


def test_a_call_that_leaves_runs_says_so(
    modules: ModuleType, inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for more, left in (([], 5), (["--cost"], 2)):  # bf16's one; of int4 two to search and two seeds
        with pytest.raises(SystemExit) as ended:
            call(*arguments(inputs, tmp_path / "out", "--rows", "bf16", "int4", "--limit", "1e-9", *more))
        assert ended.value.code == 3
        assert capsys.readouterr().err.endswith(f"{left} runs left: the same command goes on\n")
