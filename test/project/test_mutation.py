"""Test what the mutation score rests on: the mistakes made, the tests chosen, and which failures count as kills."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from tools.mutation.equivalent import EQUIVALENT  # noqa: E402
from tools.mutation.operators import compiles, mutants  # noqa: E402
from tools.mutation.ran import Measured, choose  # noqa: E402

SOURCE = b'''"""A docstring: 1 + 1."""
from x import y

@cache(2)
def f(a: int | None, b: float = 0.5) -> int | None:
    if a is None and not b:
        raise ValueError(f"{a + 1} is no number")
    if a.is_cuda:
        return a + 2
    b -= 1  # \xc3\xa4
    return torch.where((a) <= (b), a.clamp(min=b), max(a, b))
'''
MADE = {
    "def f(a: int | None, b: float = 1.0) -> int | None:",
    "if a is not None and not b:",
    "if a is None or not b:",
    "if a is None and (b):",
    "if (not (a is None and not b)):",
    "if False:",
    "pass # \u00e4",
    "return torch.where((a) < (b), a.clamp(min=b), max(a, b))",
    "return torch.where((a) <= (b), max(a, b), a.clamp(min=b))",
    "return torch.where((a) <= (b), (a), max(a, b))",
    "return torch.where((a) <= (b), a.clamp(max=b), max(a, b))",
    "return torch.where((a) <= (b), a.clamp(min=b), min(a, b))",
}


def test_mistakes_are_made_in_code_and_nowhere_else() -> None:
    found = mutants("f.py", SOURCE)
    after = {m.after for m in found}
    assert after - {"b -= 2 # \u00e4", "b -= 0 # \u00e4"} == MADE  # one of the two
    assert len(found) == len(MADE) + 1
    for m in found:
        changed = m.apply(SOURCE)
        assert compiles(changed) and changed != SOURCE
        assert " ".join(changed.decode().splitlines()[m.line - 1].split()) == m.after


def test_a_mutant_knows_the_function_around_it() -> None:
    source = b"A = 1\nclass C:\n    b = 2\n    def f(self, c=3):\n        def g():\n            return [4 for _ in range(5)]\n"
    functions = {m.before: m.function for m in mutants("f.py", source)}
    assert functions == {
        "A = 1": "",
        "b = 2": "",
        "def f(self, c=3):": "C.f",
        "return [4 for _ in range(5)]": "C.f.<locals>.g",
    }


def test_tests_of_the_function_come_first_from_three_orders_that_share_the_time() -> None:
    f, g, other = "a.py:f", "a.py:g", "b.py:f"
    tests = [
        Measured("t.py::wide", 1, frozenset({f, g, other})),
        *(Measured(f"t.py::narrow[{n}]", 1, frozenset({f})) for n in range(4)),
        Measured("t.py::long", 9, frozenset({f})),
        Measured("u.py::file", 1, frozenset({g, other})),
        Measured("u.py::elsewhere", 1, frozenset({other})),
    ]

    def chosen(function: str, budget: float) -> list[str]:
        return [t.name.partition("::")[2] for t in choose(tests, "a.py", function, budget)]

    assert chosen("f", 6) == ["narrow[0]", "wide", "narrow[1]", "narrow[2]", "narrow[3]", "file"]
    assert chosen("f", 1.5) == ["narrow[0]"]
    assert chosen("", 3) == ["wide", "narrow[0]", "file"]


def test_every_equivalent_mutant_is_of_a_line_that_is_there() -> None:
    for e in EQUIVALENT:
        lines = [" ".join(line.split()) for line in (ROOT / "aoquant" / e.file).read_text().splitlines()]
        assert e.before in lines, f"tools/mutation/equivalent.py: {e.file} has no such line any more: {e.before}"
        assert e.before != e.after and e.why


UNSTEADY = r"""
import sys
from pathlib import Path
from tools.mutation import pool

TESTS = {
    "steady": ["from aoquant.formats import layout", "def test_it():", "    assert 'wrong' not in layout.__doc__"],
    "once": ["from pathlib import Path", "def test_it():", "    if not Path('seen').exists():",
             "        Path('seen').touch()", "        assert False"],
    "always": ["def test_it():", "    assert False"],
}
pool.prepare()
made = pool.Pool(Path(sys.argv[1]), 1)
for name, lines in TESTS.items():
    (made.slots[0] / "test" / f"test_its_{name}.py").write_text("\n".join(lines))
mutant = b"'wrong'\n"
jobs = (
    pool.Job(name, (f"test/test_its_{name}.py::{test}",), 200, "formats/layout.py", mutant)
    for name, test in [*((name, "test_it") for name in TESTS), ("steady", "test_that_is_gone")]
)
print(*(f"{done.of}={done.outcome}" for done in made.run(jobs)))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_failure_that_does_not_come_again_or_comes_without_the_mutant_kills_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", UNSTEADY, str(tmp_path)],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    said = done.stdout.split()[-4:]
    assert said == ["steady=killed", "once=unsteady", "always=unsteady", "steady=survived"], done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_tells_survivors_from_killed_goes_on_and_leaves_the_checkout_alone(tmp_path: Path) -> None:
    file = ROOT / "aoquant" / "formats" / "layout.py"
    before = file.read_bytes()
    functions = sorted({f"formats/layout.py:{m.function}" for m in mutants("formats/layout.py", before)})
    names = (
        "unpack_inverts_pack[1-7]",
        "unpack_inverts_pack[64-3]",
        "codes_may_begin_at_any_byte[3-4]",
        "low_nibble_is_even_k_as_in_torchao",
        "bit_planes_by_hand",
        "swizzle_formula",
        "swizzle_is_torchaos_and_inverts[(1, 1)]",
    )
    tests = {f"test/formats/test_layout.py::test_{name}": [1.0, [*range(len(functions))]] for name in names}
    (tmp_path / "ran.json").write_text(json.dumps({"functions": functions, "tests": tests}))

    def run(number: int) -> tuple[str, list[dict[str, str]]]:
        command = [sys.executable, "-m", "tools.mutation", "--only", "formats/layout.py", "--number", str(number)]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [*command, "--workers", "1", "--out", str(tmp_path), "--ran", str(tmp_path / "ran.json")],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        with open(tmp_path / "mutation.csv", newline="") as rows:
            return done.stdout, list(csv.DictReader(rows))

    said, rows = run(4)
    assert "4 mutants, 0 known, 4 to run" in said and len(rows) == 4
    assert {row["outcome"] for row in rows} <= {"killed", "survived", "timeout"}
    assert sum(row["outcome"] == "killed" for row in rows) >= 2
    said, again = run(5)
    assert "5 mutants, 4 known, 1 to run" in said and len(again) == 5
    assert {row["id"] for row in rows} < {row["id"] for row in again}
    assert file.read_bytes() == before
