"""FSDP2, DDP and tensor parallelism on the CPU: two processes, gloo, every check of `distributed_checks` but the
numbered ones, which test/hybrid/test_hybrid_gather.py makes.

One test, because starting the processes takes longer than most of the checks, and each worker of pytest-xdist would
start its own.
"""

from pathlib import Path

import pytest
from support import distributed_checks


def failures(results: dict[str, str], wanted: list[str]) -> str:
    """Every check that failed or was not reached, with its traceback."""
    found = {name: results.get(name, "was not reached") for name in wanted}
    return "\n\n".join(f"{name}: {error}" for name, error in found.items() if error)


def test_two_processes_and_then_one(tmp_path: Path) -> None:
    elsewhere = {*distributed_checks.SLOW, *distributed_checks.NUMBERED}
    fast = [name for name in distributed_checks.CHECKS if name not in elsewhere]
    assert not (failed := failures(distributed_checks.run("gloo", "cpu", tmp_path, fast), fast)), failed
    for how in distributed_checks.RESUMED:
        distributed_checks.one_process_resumes(tmp_path, how)


@pytest.mark.slow
def test_wide_sweep(tmp_path: Path) -> None:
    slow = sorted(distributed_checks.SLOW)
    assert not (failed := failures(distributed_checks.run("gloo", "cpu", tmp_path, slow), slow)), failed
