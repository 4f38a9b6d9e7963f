"""benchmarks/scaling.py: its arithmetic, its page, and its collectives on two CPU ranks."""

from __future__ import annotations

import csv
import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
BANDWIDTH = {"all_gather": 400.0, "reduce_scatter": 200.0}


@pytest.fixture
def scaling(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("scaling")


def test_a_layer_has_the_bytes_of_the_model_that_is_timed(scaling: ModuleType) -> None:
    from llamas import build, llama
    from torch import device

    size = llama(256, 1, 8)
    (layer,) = build(size, device("meta")).model.layers
    assert scaling.layer_bytes(256) == 2 * sum(p.numel() for p in layer.parameters() if p.dim() == 2)


def test_the_projection_is_what_the_text_says(scaling: ModuleType) -> None:
    layer = scaling.layer_bytes(4096)
    of_two = 16 * layer / 2 * (2 / 400e9 + 1 / 200e9)
    p = scaling.projection({1: 0.4, 2: 0.4 + of_two / 2}, BANDWIDTH, 16, 4096)
    assert p.messages(2) == pytest.approx(of_two) and p.exposed == pytest.approx(0.5)
    assert p.step(2) == pytest.approx(0.4 + of_two / 2)
    between = 16 * layer * 63 / 64 * 3 / (scaling.BETWEEN_HOSTS * 1e9)  # both collectives at the slower link
    assert p.messages(64) == pytest.approx(between) and p.step(64) == pytest.approx(max(0.4 + between / 2, between))
    faster = scaling.projection({1: 0.4, 2: 0.39}, BANDWIDTH, 16, 4096)
    assert faster.exposed == 0.0 and faster.step(2) == 0.4  # noise is no gain


def test_the_page_follows_its_rows(scaling: ModuleType) -> None:
    def row(gpus: int, ms: float, variant: str = "bf16", layers: int = 16, gpu: str = "new") -> dict[str, str]:
        names = {
            "how": "eager",
            "hidden": 4096,
            "layers": layers,
            "gpus": gpus,
            "variant": variant,
            "ms": ms,
            "gpu": gpu,
        }
        more = {
            "vocabulary": 32768,
            "optimizer": "adamw",
            "batch": 4,
            "tokens": 2048,
            "tokens_per_s": 8192e3 / ms,
            "peak_MiB": 1024,
        }
        return {k: str(v) for k, v in (names | more).items()}

    steps = [row(2, 999.0), row(2, 420.0), row(2, 430.0, "nvfp4"), row(2, 100.0, layers=8)]
    page = scaling.page(steps, [], 4096, 16)
    assert "| `bf16` | 39,010, 1.0 |" in page and "| `nvfp4` |" in page and "Projected" not in page  # the newest row

    def link(collective: str, rate: float, gpus: int = 4, hidden: int = 4096, gpu: str = "new") -> dict[str, str]:
        names = {"collective": collective, "GB_per_s": rate, "ms": 1, "gpus": gpus, "hidden": hidden, "gpu": gpu}
        return {k: str(v) for k, v in names.items()}

    links = [link(c, rate) for c, rate in BANDWIDTH.items()]
    of_others = [link(c, 1.0, **other) for c in BANDWIDTH for other in ({"gpus": 2}, {"hidden": 256}, {"gpu": "old"})]
    assert scaling.fastest([*links, *of_others], 4096, "new") == BANDWIDTH
    old = [row(n, 1.0, gpu="old") for n in (1, 8)]
    page = scaling.page([*old, *steps, row(1, 400.0)], links, 4096, 16)
    assert page == scaling.page([*steps, row(1, 400.0)], links, 4096, 16)  # steps of one device
    assert "No projection" in scaling.page([*steps, row(1, 400.0)], of_others[1::3], 4096, 16)
    projected = page.partition("Projected")[2]
    assert "64 GPUs" in projected and "| `bf16` |" in projected and "nvfp4" not in projected  # no row of one GPU


def test_the_page_in_the_docs_is_of_the_files(scaling: ModuleType) -> None:
    steps, links = (scaling.read(scaling.RESULTS / f"{n}.csv") for n in ("model_fsdp2", "communication"))
    text = (ROOT / "docs" / "evidence" / "results.md").read_text(encoding="utf-8")
    assert f"<!-- scaling -->\n\n{scaling.page(steps, links, 4096, 16)}\n\n<!-- end of scaling -->" in text


@pytest.mark.slow
def test_two_ranks_measure_their_collectives(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / "benchmarks" / "scaling.py"), "--hidden", "256", "--repeats", "2", "--out", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    with (tmp_path / "communication.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [r["collective"] for r in rows] == ["all_gather", "reduce_scatter"] and {r["gpus"] for r in rows} == {"2"}
    assert all(float(r["GB_per_s"]) > 0 for r in rows)
