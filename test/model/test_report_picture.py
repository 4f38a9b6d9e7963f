"""report.png: bars of what differs, or, where nothing does, of what quantisation costs, and a title that says so."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import matplotlib.axes
import torch
from torch import Tensor, nn

from aoquant import Int4WeightConfig, QATConfig, quantize_, report
from aoquant.report import render


def forms() -> tuple[nn.Module, nn.Module, nn.Module]:
    """(float, prepared, converted) with equal weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    prepared = copy.deepcopy(model)
    quantize_(prepared, QATConfig(Int4WeightConfig(32), step="prepare"))
    converted = copy.deepcopy(prepared)
    quantize_(converted, QATConfig(step="convert"))
    return model, prepared, converted


def batch() -> Tensor:
    return torch.randn(8, 64)


def drawn(found: Any, path: Path) -> tuple[str, list[str], list[float]]:
    """(title, words, widths of bars) of a picture."""
    axes = matplotlib.axes.Axes
    with (
        mock.patch.object(axes, "set_title", autospec=True, side_effect=axes.set_title) as title,
        mock.patch.object(axes, "text", autospec=True, side_effect=axes.text) as words,
        mock.patch.object(axes, "barh", autospec=True, side_effect=axes.barh) as bars,
    ):
        found.plot(path)
    assert path.read_bytes().startswith(b"\x89PNG")
    return title.call_args.args[1], [c.args[3] for c in words.call_args_list], [c.args[2] for c in bars.call_args_list]


def test_an_exact_report_shows_what_quantisation_costs(tmp_path: Path) -> None:
    model, prepared, converted = forms()
    found = report(prepared, converted, batch(), progress=False)
    costs = {r.fqn: r.weight_sqnr_db for r in report(model, converted, batch(), progress=False).layers}
    assert {r.fqn: r.quantisation_db for r in found.layers} == costs and all(10 < (v or 0) < 40 for v in costs.values())
    title, words, bars = drawn(found, tmp_path / "report.png")
    assert title == render.bit_equal(found.layers) == "prepared == converted in all 2 layer(s) (bit for bit)"
    assert words == [f" {v:.1f}" for v in costs.values()]
    assert bars == list(costs.values())


def test_a_difference_is_shown_beside_what_is_equal(tmp_path: Path) -> None:
    _, prepared, converted = forms()
    converted[2].weight.qdata[3, 3] ^= 1  # type: ignore[index]
    title, words, bars = drawn(report(prepared, converted, batch(), progress=False), tmp_path / "report.png")
    assert "SQNR by layer" in title and words.count(" inf") == 2 and len(bars) == 4


def test_what_is_not_exact_or_did_not_run_is_not_called_exact() -> None:
    _, prepared, converted = forms()
    rows = list(report(prepared, converted, batch(), progress=False).layers)
    assert render.bit_equal([replace(rows[0], output_sqnr_db=None), rows[1]]) == (
        "prepared == converted in all 1 layer(s) (bit for bit) that ran; 1 did not run"
    )
    for wrong in ({"output_sqnr_db": 90.0}, {"weight_sqnr_db": math.nan}):
        assert render.bit_equal([replace(rows[0], **wrong), rows[1]]) == ""  # type: ignore[arg-type]
    assert render.bit_equal([replace(r, output_sqnr_db=None) for r in rows]) == render.bit_equal([]) == ""
    assert render.bit_equal(report(converted, copy.deepcopy(converted), batch(), progress=False).layers) == ""
