"""benchmarks/walk.py counts what it says, and the table of docs/architecture.md has its counts, within a tenth."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest
from support import forked

ROOT = Path(__file__).parents[2]
SLACK = 0.1


@pytest.fixture
def walk(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("walk")


def test_the_table_of_walks_is_up_to_date() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (forward|backward|packed forward|prepare) \| ([\d |]+) \|$", page, re.MULTILINE)
    said = {step: [int(n) for n in re.findall(r"\d+", numbers)] for step, numbers in rows}
    done = forked.script(ROOT / "benchmarks" / "walk.py", "nvfp4", "--no-times", "--no-house")
    assert done.returncode == 0, done.stderr
    counted = dict(re.findall(r"^([a-z][a-z ]*?) {2,}([\d ]+)$", done.stdout, re.MULTILINE))
    assert said.keys() == counted.keys() == {"forward", "backward", "packed forward", "prepare"}
    for step, numbers in counted.items():
        for now, written in zip(map(int, numbers.split()), said[step], strict=True):
            assert abs(now - written) <= max(1, SLACK * written), (step, numbers, said[step])


def test_calls_in_the_numbers_are_counted_apart(
    walk: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """outer -> arithmetic -> inner: three calls in three files, of which two are outside the numbers."""
    monkeypatch.setattr(walk, "HOME", tmp_path)
    names: dict[str, object] = {}
    files = {
        "a.py": "inner = lambda: 1",
        "formats/b.py": "arithmetic = lambda: inner()",
        "c.py": "outer = lambda: arithmetic()",
    }
    for name, code in files.items():
        exec(compile(code, str(tmp_path / name), "exec"), names)
    counts = walk.walked(names["outer"])
    assert (counts.all_calls, counts.all_files, counts.all_depth) == (3, 3, 3)
    assert (counts.calls, counts.functions, counts.files, counts.depth) == (2, 2, 2, 2)


def test_circles_are_found_between_files_and_between_siblings(walk: ModuleType) -> None:
    line = [("p", "p.a"), ("p.a.x", "p.b.y"), ("p.b.y", "p.c")]
    assert walk.circles(line) == walk.circles_of_siblings(line) == []
    back = [*line, ("p.b.z", "p.a.w")]  # no file reaches itself, but packages a and b do
    assert walk.circles(back) == [] and walk.circles_of_siblings(back) == [["p.a", "p.b"]]
    closed = [*line, ("p.c", "p.a.x")]
    assert walk.circles(closed) == [["p.a.x", "p.b.y", "p.c"]]
    assert walk.circles_of_siblings(closed) == [["p.a", "p.b", "p.c"]]


def test_the_house_is_counted() -> None:
    """The counts of a script that ran; a circle has its members behind it."""
    done = forked.python("import sys; sys.path.insert(0, sys.argv[1]); import walk; walk.house()", ROOT / "benchmarks")
    assert done.returncode == 0, done.stderr
    counts = dict(re.findall(r"^(\w\S*(?: \S+)*) {2,}(\d+)$", done.stdout, re.MULTILINE))
    assert counts.keys() >= {"circles of files", "circles of siblings", "file names of two files or more"}
    assert int(counts["lines of aoquant/"]) > 1000 and int(counts["lines of test/"]) > 1000
    circles = re.findall(r"^ +\d+: .+$", done.stdout, re.MULTILINE)
    assert len(circles) == int(counts["circles of files"]) + int(counts["circles of siblings"])
