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
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("aoquant", "test", "benchmarks", "csrc", "eval", "docs", "pyproject.toml", "README.md", "CHANGELOG.md")
HEAVY = (
    "torch", "torch._dynamo", "torch.distributed.tensor", "torchao.quantization", "transformers.models.llama.modeling_llama",
    "transformers.quantizers.quantizer_torchao", "peft", "safetensors.torch", "ml_dtypes", "hypothesis", "xdist",
)  # fmt: skip
MARKS = "not gpu and not slow and not nightly"
KILLED, SURVIVED, TIMEOUT, BROKEN, UNSTEADY = "killed", "survived", "timeout", "broken", "unsteady"
_UNSTEADY = 71  # a fork's exit code
_OUTCOMES = {
    0: SURVIVED,
    1: KILLED,
    2: KILLED,
    _UNSTEADY: UNSTEADY,
}  # pytest's exit codes: passed, failed, interrupted by an error in collection
T = TypeVar("T")


class Job(NamedTuple, Generic[T]):
    """tests: paths below test/. file, source: what to overwrite in the copy of the package, if anything; then the first
    failure ends the run. limit: seconds. without: node ids that are left out.
    """

    of: T
    tests: tuple[str, ...]
    limit: float
    file: str = ""
    source: bytes = b""
    without: tuple[str, ...] = ()


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
        first.mkdir(parents=True)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, first / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.exists():
                shutil.copy2(source, first / name)
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
        if job.file:
            self._write(slot, job.file, job.source)
        if process := os.fork():
            return process
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os._exit(self._test(job, slot))
        finally:
            os._exit(70)

    def _test(self, job: Job[T], slot: int) -> int:
        """In the fork: pytest's exit code, of a mutant's second run."""
        place = self.slots[slot]
        os.setsid()
        os.sched_setaffinity(0, {self.cores[slot % len(self.cores)]})
        os.chdir(place)
        log = os.open(place / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ["PYTHONPATH"] = str(place)
        sys.path[:] = [str(place), *(p for p in sys.path if Path(p or ".").resolve() != ROOT)]
        (place / "failed").write_text("")
        code = _in_a_fork(job, job.tests)
        if not job.file or code == 0:
            return code
        again = _that_failed(job.tests, self._failed(slot))
        if not _in_a_fork(job, again):
            return _UNSTEADY
        self._write(slot, job.file, (ROOT / "aoquant" / job.file).read_bytes())
        return _UNSTEADY if _in_a_fork(job, again) else code

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
            if one.job.file:
                self._write(one.slot, one.job.file, (ROOT / "aoquant" / one.job.file).read_bytes())
            yield Done(one.job.of, outcome, time.monotonic() - one.began, log, self._failed(one.slot)), one.slot
        time.sleep(0.02)

    def _write(self, slot: int, file: str, source: bytes) -> None:
        path = self.slots[slot] / "aoquant" / file
        path.write_bytes(source)
        for stale in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            stale.unlink()


class _Failures:
    """A pytest plugin that writes down what fails, at once, so that a process which dies later leaves it."""

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._note(report)

    def pytest_collectreport(self, report: Any) -> None:
        self._note(report)

    def _note(self, report: Any) -> None:
        if report.failed:
            with open("failed", "a") as file:
                file.write(f"{report.nodeid}\n")


def _in_a_fork(job: Job[T], tests: tuple[str, ...]) -> int:
    """pytest's exit code; the number of a signal that ended it, negative."""
    if process := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    try:
        import pytest

        stop = ("-x",) if job.file else ()
        left = [f"--deselect={name}" for name in job.without]
        options = ("-q", "-n", "0", "--tb", "line", "-p", "no:cacheprovider", "-m", MARKS)
        os._exit(int(pytest.main([*stop, *options, *left, *(f"test/{name}" for name in tests)], [_Failures()])))
    finally:
        os._exit(70)


def _that_failed(tests: tuple[str, ...], failed: tuple[str, ...]) -> tuple[str, ...]:
    """What to run again: the tests that failed, those of a file that could not be collected, or all."""
    names = [name.removeprefix("test/") for name in failed]
    single = [name for name in names if "::" in name]
    return tuple(single or [t for t in tests if t.partition("::")[0] in names] or tests)


def _kill(process: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)
