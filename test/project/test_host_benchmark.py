"""benchmarks/host.py: its rows on a CPU, its ratios, and that host time has no device in it."""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch
from test_model_benchmark import ran, rows


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    return importlib.import_module("host")


def test_every_kind_has_its_rows(tmp_path: Path) -> None:
    out = tmp_path / "host.csv"
    run = ran("host.py", "--recipes", "int4-g128", "--out", str(out))
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    found = [(row["kind"], row["variant"], row["call"]) for row in rows(out)]
    linear = [("nn.Linear", "step"), ("nn.Linear", "no grad"), ("F.linear", "no grad")]
    ours = [("int4-g128", call) for call in ("step", "no grad", "fixed weights", "packed")]
    steps = [(variant, how) for variant in ("nn.Linear", "int4-g128") for how in ("eager", "compiled")]
    assert found == [("host", *key) for key in linear + ours] + [("graph", *key) for key in steps]
    for row in rows(out):
        assert float(row["us"]) > 0 and float(row["to_linear"]) > 0 and not row["note"], row
        assert row["gpu"] and row["torch"] and row["date"] and row["command"]


def test_a_limit_and_a_recipe_that_raises_leave_a_note(
    host: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, late = host.QUICK[0], host.Deadline(1e-9)
    assert [row["note"] for row in host.host_of(["int4-g128"], shape, 1, late)] == [host.OUT_OF_TIME]
    found = host.graph_of(["int4-g128"], shape, 1, "eager", late)
    assert len(found) == 4 and {row["note"] for row in found} == {host.OUT_OF_TIME}
    found = host.host_of(["int5"], shape, 1, host.Deadline(0))
    assert [row["variant"] for row in found] == ["nn.Linear", "nn.Linear", "F.linear", "int5"]
    assert "int5" in found[-1]["note"] and not found[-1]["us"]


def test_ratios_are_to_the_call_of_the_same_kind(host: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    us = {("nn.Linear", "step"): 8, ("nn.Linear", "no grad"): 4, ("F.linear", "no grad"): 2, ("a", "step"): 16,
          ("a", "packed"): 1}  # fmt: skip
    seen: dict[object, list[bool]] = {}

    def taken(run: object, repeats: int, device: object) -> float:
        seen.setdefault(run, []).append(torch.is_grad_enabled())
        return us[run] / 1e6 * (len(seen[run]) + 1) / 2  # the first series is the least

    monkeypatch.setattr(host, "host_seconds", taken)
    monkeypatch.setattr(host, "seconds", taken)
    found = {(r["variant"], r["call"]): r for r in host.host_rows({key: key for key in us}, (128, 128, 16), 2)}
    assert found["a", "step"]["us"] == pytest.approx(16) and found["a", "step"]["to_linear"] == pytest.approx(2)
    packed = found["a", "packed"]
    assert packed["to_linear"] == pytest.approx(0.25) and packed["to_f_linear"] == pytest.approx(0.5)
    assert all(set(flags) == {call == "step"} for (_, call), flags in seen.items())  # type: ignore[misc]
    us, seen = {("nn.Linear", "eager"): 8, ("a", "eager"): 6, ("a", "graph"): 4}, {}
    (linear, eager, graph) = host.graph_rows({key: key for key in us}, (128, 128, 16), 1)
    assert (linear["to_linear"], linear["to_graph"]) == (pytest.approx(1), "")  # it has no graph here
    assert eager["to_linear"] == pytest.approx(0.75) and eager["to_graph"] == pytest.approx(1.5)
    assert graph["to_graph"] == pytest.approx(1)


def test_the_time_of_the_host_ends_before_the_device_does(host: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "wait", lambda device: time.sleep(0.2))
    assert host.host_seconds(lambda: None, 2, torch.device("cpu")) < 0.05
