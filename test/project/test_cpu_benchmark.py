"""Training a prepared layer on a CPU takes no longer than torchao's QAT of the same base; the table of packed models
has its rows. See benchmarks/cpu.py for both.
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


@pytest.mark.slow
def test_generate_has_a_row_for_every_variant() -> None:
    """Of the demo model, with numbers that hang together; how fast it is depends on the machine."""
    command = [sys.executable, str(ROOT / "benchmarks" / "cpu.py"), "generate", "--models", "demo-256"]
    sizes = ["--rounds", "1", "--new", "2", "--prompt", "4", "--prefill", "8"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run([*command, *sizes], env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert run.returncode in (0, 1), run.stderr[-2000:]
    assert "Loading weights" not in run.stderr and "profiler_st" not in run.stderr  # nothing between rows
    names, *rows = [line.split(",") for line in run.stdout.splitlines() if line and not line.startswith("#")]
    table = [dict(zip(names, row, strict=True)) for row in rows]
    assert len(table) == 14 and {row["part"] for row in table} == {"generate", "prefill"}
    for row in table:
        assert float(row["ms"]) > 0 and bool(row["of_torchao"]) == (
            row["variant"] in ("int4-g128", "int8-int4", "int8")
        )
        assert row["variant"] == "bf16" or float(row["peak_of_bf16"]) < 1
