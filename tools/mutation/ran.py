"""Measure which functions of the package each test runs, and choose the tests that should notice a mutant.

`measure` runs the CPU tests once under `sys.settrace`, in every process that they start, and writes
build/mutation.json. Tracing calls makes the tests about a fifth slower. `sys.monitoring` would need Python 3.12.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Sequence
from multiprocessing import util
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = f"{ROOT / 'aoquant'}/"
MAP = ROOT / "build" / "mutation.json"
MARKS = "not gpu and not slow and not nightly"
FOLDER = "AOQUANT_MUTATION_RAN"
_NAMELESS = re.compile(r"(\.<locals>)?\.?<(?!locals>).*")  # a lambda or comprehension belongs to the function around it
_codes: dict[int, CodeType] = {}  # by id: the hash of a code object reads all of its constants
_ours: dict[str, bool] = {}
_failed: list[str] = []


class Measured(NamedTuple):
    """Functions are "file:qualified name", with paths below aoquant/."""

    name: str
    seconds: float
    functions: frozenset[str]


def measure(workers: int, path: Path, files: Sequence[str]) -> None:
    """Run the CPU tests, or those of some files alone, and write the map of the tests that pass."""
    known = [t for t in read(path) if t.name.partition("::")[0] not in files] if files and path.exists() else []
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        Path(folder, "sitecustomize.py").write_text("from tools.mutation import ran\nran.trace_process()\n")
        places = os.pathsep.join((str(ROOT), folder, *filter(None, [os.environ.get("PYTHONPATH")])))
        options = ("-q", "-n", str(workers), "--dist", "worksteal", "-m", MARKS, "-p", "tools.mutation.ran")
        environment = os.environ | {FOLDER: folder, "PYTHONPATH": places}
        subprocess.run([sys.executable, "-m", "pytest", *options, *files], cwd=ROOT, env=environment, check=False)
        lines = [json.loads(line) for file in Path(folder).glob("*.jsonl") for line in file.read_text().splitlines()]
    functions = defaultdict[str, set[str]](set, {t.name: set(t.functions) for t in known})
    seconds = {t.name: t.seconds for t in known}
    for name, took, ran in lines:
        functions[name].update(ran)
        if took is not None:
            seconds[name] = took
    table = {name: index for index, name in enumerate(sorted({f for name in seconds for f in functions[name]}))}
    tests = {name: [took, sorted(table[f] for f in functions[name])] for name, took in sorted(seconds.items())}
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"functions": list(table), "tests": tests}))
    print(f"{len(tests)} tests that pass run {len(table)} functions: {path}")


def read(path: Path) -> list[Measured]:
    """Return the tests of the map."""
    if not path.exists():
        raise SystemExit(f"There is no {path}: run python -m tools.mutation --map first.")
    known = json.loads(path.read_text())
    names = known["functions"]
    return [Measured(name, took, frozenset(names[i] for i in ran)) for name, (took, ran) in known["tests"].items()]


def choose(tests: Iterable[Measured], file: str, function: str, budget: float) -> list[Measured]:
    """Return the tests for a mutant in a function, or outside of functions where `function` is "", best first.

    Tests that ran the function come first, from three orders that share the time: how few other functions they ran;
    the first case of each test, since hundreds of cases may run the fewest; how many functions of the file they ran,
    since a branch that few tests reach calls what few tests run. The rest of the budget, in seconds, goes to the other
    tests of the file: a function whose result is cached was measured in one test only.
    """
    here, prefix = f"{file}:{function}", f"{file}:"
    near, far = list[tuple[int, Measured]](), list[tuple[int, Measured]]()
    for test in tests:
        if share := sum(f.startswith(prefix) for f in test.functions):
            (near if function and here in test.functions else far).append((share, test))
    chosen = dict[str, Measured]()
    for found in (near, far):
        broad = [t for _, t in sorted(found, key=lambda f: (-f[0], len(f[1].functions)))]
        narrow = broad if found is far else sorted(broad, key=lambda t: len(t.functions))
        orders = narrow, _one_case_of_each_first(narrow), _one_case_of_each_first(broad)
        spent = {iter(order): 0.0 for order in orders}
        while spent:
            order = min(spent, key=spent.__getitem__)  # the turn of the order that has taken the least time
            following = next(order, None)
            if following is None:
                del spent[order]
            elif following.name not in chosen and following.seconds <= budget:
                chosen[following.name] = following
                budget -= following.seconds
                spent[order] += following.seconds
    return [*chosen.values()]


def _one_case_of_each_first(tests: Iterable[Measured]) -> list[Measured]:
    cases, rounds = Counter[str](), list[tuple[int, int, Measured]]()
    for place, test in enumerate(tests):
        case = test.name.partition("[")[0]
        rounds.append((cases[case], place, test))
        cases[case] += 1
    return [test for _, _, test in sorted(rounds)]


def trace_process() -> None:
    """Trace a process that a test starts, and write down at its end what it ran."""
    if os.environ.get("PYTEST_CURRENT_TEST"):  # a server of forks too, whose children belong to later tests
        sys.settrace(_enter)
        threading.settrace(_enter)
        atexit.register(_write_process)
        util.register_after_fork(_codes, _begin_fork)


def _begin_fork(codes: dict[int, CodeType]) -> None:
    codes.clear()
    util.Finalize(None, _write_process, exitpriority=0)  # a fork of multiprocessing runs no atexit


def _write_process() -> None:
    if test := os.environ.get("PYTEST_CURRENT_TEST"):
        _write(test.rpartition(" ")[0], None)


def _enter(frame: FrameType, event: str, argument: Any) -> None:
    code = frame.f_code
    file = code.co_filename
    if (ours := _ours.get(file)) is None:
        ours = _ours[file] = file.startswith(PACKAGE)
    if ours:
        _codes[id(code)] = code


def _write(test: str, seconds: float | None) -> None:
    ran = {f"{c.co_filename.removeprefix(PACKAGE)}:{_NAMELESS.sub('', c.co_qualname)}" for c in [*_codes.values()]}
    with open(Path(os.environ[FOLDER], f"{os.getpid()}.jsonl"), "a") as file:
        file.write(json.dumps([test, seconds, sorted(ran)]) + "\n")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Trace one test with its fixtures."""
    _codes.clear()
    _failed.clear()
    began = time.perf_counter()
    sys.settrace(_enter)
    threading.settrace(_enter)
    try:
        return (yield)
    finally:
        sys.settrace(None)
        threading.settrace(None)
        if not _failed:
            _write(item.nodeid, time.perf_counter() - began)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Remember that the test failed or was skipped, which makes it no witness."""
    if not report.passed:
        _failed.append(report.nodeid)
