"""benchmarks/moe.py runs from end to end on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_model_benchmark import ran, rows


@pytest.mark.slow
def test_every_part_has_its_rows(tmp_path: Path) -> None:
    """Both parts, both things that are timed; a limit ends a run."""
    out = tmp_path / "moe.csv"
    run = ran("moe.py", "--recipes", "nvfp4", "--out", str(out))
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    found = rows(out)
    for part in ("train", "decode"):
        for shape in ("tiny", "tiny-gpt-oss"):
            for what, more in (("block", ["hf-eager"]), ("products", [])):
                cell = [r for r in found if (r["part"], r["shape"], r["what"]) == (part, shape, what)]
                assert [r["variant"] for r in cell] == ["bf16", "nvfp4", *more]
                assert all(float(r["ms"]) > 0 and not r["note"] for r in cell), cell
    assert ran("moe.py", "train", "--limit", "0.0001", "--out", str(out)).returncode == 0
    late = rows(out)[len(found) :]
    assert late and all(row["note"] == "not run: out of time" for row in late)
