"""The table of docs/architecture.md says how far a tensor walks now: what benchmarks/walk.py counts, within a tenth."""

from __future__ import annotations

import re
from pathlib import Path

from support import forked

ROOT = Path(__file__).parents[2]
SLACK = 0.1


def test_the_table_of_walks_is_up_to_date() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([a-z ]+), now \| ([\d |]+) \|$", page, re.MULTILINE)
    said = {step: [int(n) for n in re.findall(r"\d+", numbers)] for step, numbers in rows}
    done = forked.script(ROOT / "benchmarks" / "walk.py", "nvfp4", "--no-times")
    assert done.returncode == 0, done.stderr
    counted = dict(re.findall(r"^([a-z][a-z ]*?) {2,}([\d ]+)$", done.stdout, re.MULTILINE))
    assert said.keys() == counted.keys() == {"forward", "backward", "packed forward", "prepare"}
    for step, numbers in counted.items():
        for now, written in zip(map(int, numbers.split()), said[step], strict=False):
            assert abs(now - written) <= max(1, SLACK * written), (step, numbers, said[step])
