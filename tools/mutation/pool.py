"""Run tests in forks of one process that has imported torch, so that a run pays for our package alone.

Each slot has a copy of the package and the tests, which a mutant is written into; the checkout is never touched. A fork
gets one core (tests take as many threads as there are cores to run on), a session of its own and a deadline, after
which all of it is killed.

A failure counts as a mutant's if it can be repeated: what failed has to fail again with the mutant, and to pass without
it, in the same place. A test that fails now and then, a full disk or a pytest that does not start kill no mutant.
"""

from __future__ import annotations

import compileall
import importlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import pytest

from .ran import ROOT

LEFT = (
    ".git",
    ".venv",
    ".engines",
    ".versions",
    ".release",
    "build",
    "dist",
    "site",
    "*.egg-info",
    "*_cache",
    "__pycache__",
)
HEAVY = (
    "torch", "torch._dynamo", "torch.distributed.tensor", "torchao.quantization", "transformers.models.llama.modeling_llama",
    "transformers.quantizers.quantizer_torchao", "peft", "safetensors.torch", "ml_dtypes", "hypothesis", "xdist",
)  # fmt: skip
KILLED, SURVIVED, TIMEOUT, BROKEN, UNSTEADY = "killed", "survived", "timeout", "broken", "unsteady"
FIRST = 20  # tests that are run before the others are collected
_UNSTEADY = 71  # a fork's exit code
_OUTCOMES = {
    0: SURVIVED,
    1: KILLED,
    2: KILLED,
    _UNSTEADY: UNSTEADY,
}  # pytest's exit codes: passed, failed, interrupted by an error in collection
T = TypeVar("T")


class Job(NamedTuple, Generic[T]):
    """tests: node ids, in their order; the first failure ends the run. limit: seconds. file, source: what to overwrite
    in the copy of the package.
    """

    of: T
    tests: tuple[str, ...]
    limit: float
    file: str
    source: bytes


class Done(NamedTuple, Generic[T]):
    """outcome: killed, survived, timeout, broken where pytest itself failed, or unsteady where a failure could not be
    repeated. failed: node ids, of a test or of a file that cannot be collected. log: what pytest printed.
    """

    of: T
    outcome: str
    seconds: float
    log: str
    failed: tuple[str, ...] = ()


class _Running(NamedTuple, Generic[T]):
    job: Job[T]
    slot: int
    began: float


def prepare() -> None:
    """Import what is heavy and not ours, under the environment of the tests, with one thread."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that a run that is ended ends its forks too
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.dont_write_bytecode = True  # a mutant of the same size within a second would be taken for the file it replaced
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.path.insert(0, str(ROOT / "test"))
    importlib.import_module("conftest")  # sets the environment that the libraries read when they are imported
    sys.path.remove(str(ROOT / "test"))
    del sys.modules["conftest"]
    for name in HEAVY:
        with suppress(ImportError):
            importlib.import_module(name)
    ours = [name for name in sys.modules if name.partition(".")[0] == "aoquant"]
    if ours:
        raise RuntimeError(f"a library has imported the package before its mutation: {ours[0]}")


class Pool(Generic[T]):
    """`workers` slots below `folder`."""

    def __init__(self, folder: Path, workers: int) -> None:
        self.cores = sorted(os.sched_getaffinity(0))
        self.slots = [folder / f"slot{i}" for i in range(workers)]
        first, *others = self.slots
        shutil.copytree(ROOT, first, ignore=shutil.ignore_patterns(*LEFT))
        compileall.compile_dir(first / "aoquant", quiet=2)
        for slot in others:
            shutil.copytree(first, slot)

    def run(self, jobs: Iterable[Job[T]]) -> Iterator[Done[T]]:
        """Run all jobs, as many at a time as there are slots; yields each as it ends."""
        waiting, running = iter(jobs), dict[int, _Running[T]]()
        free, more = list(range(len(self.slots))), True
        try:
            while True:
                while free and more:
                    job = next(waiting, None)
                    if job is None:
                        more = False
                        break
                    slot = free.pop()
                    running[self._start(job, slot)] = _Running(job, slot, time.monotonic())
                if not running:
                    return
                for done, slot in self._ended(running):
                    free.append(slot)
                    yield done
        finally:
            for process in running:
                _kill(process)

    def _start(self, job: Job[T], slot: int) -> int:
        self._write(slot, job.file, job.source)
        if process := os.fork():
            return process
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os._exit(self._test(job, slot))
        finally:
            os._exit(70)

    def _test(self, job: Job[T], slot: int) -> int:
        """In the fork: pytest's exit code for the tests that the mutant alone makes fail."""
        place = self.slots[slot]
        os.setsid()
        os.sched_setaffinity(0, {self.cores[slot % len(self.cores)]})
        os.chdir(place)
        log = os.open(place / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ["PYTHONPATH"] = str(place)
        sys.path[:] = [str(place), *(p for p in sys.path if Path(p or ".").resolve() != ROOT)]
        unsteady = list[str]()
        for tests in (job.tests[:FIRST], job.tests[FIRST:]):  # few files to collect before the likeliest tests
            while tests:
                (place / "failed").write_text("")
                if not (code := _in_a_fork(tests)):
                    break
                failed = self._failed(slot)
                again = tuple(t for t in tests if t in failed or t.partition("::")[0] in failed) or tests
                if _in_a_fork(again):
                    self._write(slot, job.file, (ROOT / "aoquant" / job.file).read_bytes())
                    if not _in_a_fork(again):
                        return code
                    self._write(slot, job.file, job.source)
                unsteady += again  # these say nothing of the mutant, but later ones may
                tests = tests[tests.index(again[-1]) + 1 :]
        (place / "failed").write_text("\n".join(unsteady))
        return _UNSTEADY if unsteady else 0

    def _failed(self, slot: int) -> tuple[str, ...]:
        path = self.slots[slot] / "failed"
        return tuple(dict.fromkeys(path.read_text().splitlines())) if path.exists() else ()

    def _ended(self, running: dict[int, _Running[T]]) -> Iterator[tuple[Done[T], int]]:
        for process, one in list(running.items()):
            late = time.monotonic() - one.began > one.job.limit
            if late:
                _kill(process)
            found, status = os.waitpid(process, 0 if late else os.WNOHANG)
            if not found:
                continue
            del running[process]
            _kill(process)  # what the tests started and left
            outcome = TIMEOUT if late else _OUTCOMES.get(os.waitstatus_to_exitcode(status), BROKEN)
            log = (self.slots[one.slot] / "log").read_text(errors="replace")
            self._write(one.slot, one.job.file, (ROOT / "aoquant" / one.job.file).read_bytes())
            yield Done(one.job.of, outcome, time.monotonic() - one.began, log, self._failed(one.slot)), one.slot
        time.sleep(0.02)

    def _write(self, slot: int, file: str, source: bytes) -> None:
        path = self.slots[slot] / "aoquant" / file
        path.write_bytes(source)
        for stale in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            stale.unlink()


class _Chosen:
    """Run the chosen tests in their order, and write down what fails at once: a process that dies later leaves it.

    Not as pytest's arguments: a mutant may change the cases of a test, and a case that is gone is no failure.
    """

    def __init__(self, tests: Sequence[str]) -> None:
        self.places = {test: place for place, test in enumerate(tests)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((i for i in items if i.nodeid in self.places), key=lambda i: self.places[i.nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed:
            with open("failed", "a") as file:
                file.write(f"{report.nodeid}\n")


def _in_a_fork(tests: tuple[str, ...]) -> int:
    """pytest's exit code, 0 where no test is left; the number of a signal that ended it, negative."""
    if process := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        return 0 if code == pytest.ExitCode.NO_TESTS_COLLECTED else code
    try:
        options = ("-x", "-q", "-n", "0", "--tb", "line", "-p", "no:cacheprovider")
        files = dict.fromkeys(test.partition("::")[0] for test in tests)
        os._exit(int(pytest.main([*options, *files], [_Chosen(tests)])))
    finally:
        os._exit(70)


def _kill(process: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)
