"""Result files name the code that made them: the commit of a checkout, and the columns of tables that get more rows."""

from __future__ import annotations

import importlib
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture
def checkout(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.delenv("AOQUANT_COMMIT", raising=False)
    monkeypatch.syspath_prepend(str(ROOT / "eval"))
    found = importlib.import_module("checkout")
    found.commit.cache_clear()
    return found


def test_a_commit_is_named_and_marked_where_files_differ(
    checkout: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*words: str) -> str:
        settings = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        command = ["git", "-C", str(tmp_path), *settings, *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "-q")
    (tmp_path / "file").write_text("a")
    git("add", "file")
    git("commit", "-q", "-m", "a")
    head = git("rev-parse", "--short=12", "HEAD")
    assert checkout.commit(tmp_path) == head
    (tmp_path / "file").write_text("b")
    checkout.commit.cache_clear()
    assert checkout.commit(tmp_path) == f"{head}+dirty"
    checkout.commit.cache_clear()
    assert checkout.commit(tmp_path / "absent") == ""
    monkeypatch.setenv("AOQUANT_COMMIT", "given")
    checkout.commit.cache_clear()
    assert checkout.commit(tmp_path) == "given"


@pytest.mark.parametrize("name", ["communication", "gradients", "moe", "model_train"])
def test_a_new_row_fits_the_table_that_is_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    versions = importlib.import_module("record_golden").versions(torch.device("cpu"))
    columns = (RESULTS / f"{name}.csv").read_text(encoding="utf-8").splitlines()[0].split(",")
    assert versions["commit"] and columns[: len(versions)] == list(versions)
