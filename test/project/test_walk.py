"""benchmarks/walk.py counts what it says, and the table of docs/architecture.md has its counts, within a tenth."""

from __future__ import annotations

import re
from pathlib import Path

from support import forked

ROOT = Path(__file__).parents[2]
SLACK = 0.1


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


def test_the_house_is_counted() -> None:
    """The counts of a script that ran; a circle has its members behind it."""
    done = forked.python("import sys; sys.path.insert(0, sys.argv[1]); import walk; walk.house()", ROOT / "benchmarks")
    assert done.returncode == 0, done.stderr
    counts = dict(re.findall(r"^(\w\S*(?: \S+)*) {2,}(\d+)$", done.stdout, re.MULTILINE))
    assert counts.keys() >= {"circles of files", "circles of siblings", "file names of two files or more"}
    assert int(counts["lines of aoquant/"]) > 1000 and int(counts["lines of test/"]) > 1000
    circles = re.findall(r"^ +\d+: .+$", done.stdout, re.MULTILINE)
    assert len(circles) == int(counts["circles of files"]) + int(counts["circles of siblings"])
