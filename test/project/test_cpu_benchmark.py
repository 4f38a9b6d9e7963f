"""Training a prepared layer on a CPU takes no longer than torchao's QAT of the same base; see benchmarks/cpu.py for the
table.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_no_config_is_slower_than_torchao() -> None:
    """In a process of its own with one thread, whose clock does not count its neighbours."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "benchmarks" / "cpu.py"), "--rounds", "7"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    rows = [line.split(",") for line in run.stdout.splitlines() if line and not line.startswith("#")][1:]
    assert len(rows) == 16
    assert all(float(row[2]) > 1 for row in rows)  # not vacuous: fake quantisation costs something
