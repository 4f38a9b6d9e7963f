"""Forms of a report: what the cells of its tables, its CSV, its JSON and its pictures say of each field."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import nn

import aoquant
from aoquant.report import Report, render
from aoquant.report.cache_rows import CacheRow
from aoquant.report.routing import RouterDrift
from aoquant.report.rows import Row

FULL = Row(
    "up", (128, 64), "nvfp4", "mxfp8", True, 4.5, 20.25, -3.0, "reference", 0.125, 0.0625, 1234567, "a | b", (1, 2), 30.0,
    31.5, 19.0,
)  # fmt: skip
EMPTY = Row("(model output)", output_sqnr_db=math.inf)
CACHE = CacheRow("attn", "fp8", {"k_scale": [0.5, 2.0]}, 4096, 2048, 20.0, math.inf, True)


def made(*layers: Row, **parts: Any) -> Report:
    coverage = aoquant.coverage(nn.Sequential(nn.LayerNorm(4)))
    return Report(layers, EMPTY, 12345, 6789, (1234567, 345678), coverage, **parts)


def table(text: str) -> list[dict[str, str]]:
    """Return the rows of a Markdown table by its heads."""
    cells = [[c.strip() for c in line.replace("\\|", "&").split("|")[1:-1]] for line in text.splitlines()]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


def test_each_field_has_its_cell() -> None:
    up, output = table(made(FULL).to_markdown().partition("\n\n")[0])
    assert up == {
        "layer": "up", "N×K": "128×64", "format": "nvfp4", "activation": "mxfp8", "own row": "yes", "bits": "4.50",
        "weight dB": "20.2", "output dB": "-3.0", "dx dB": "30.0", "dW dB": "31.5", "backend": "reference",
        "saturated": "12.50%", "floored": "6.25%", "bytes": "1,234,567", "warning": "a & b",
    }  # fmt: skip
    assert {name: cell for name, cell in output.items() if cell} == {"layer": "(model output)", "output dB": "inf"}
    (plain, _) = table(
        made(replace(FULL, input_gradient_sqnr_db=None, batch_invariant=False)).to_markdown().partition("\n\n")[0]
    )
    assert plain.keys() == up.keys() - {"dx dB", "dW dB"} and plain["own row"] == "no"


def test_words_are_to_the_left_and_numbers_to_the_right() -> None:
    heads = [cell for cell in made(FULL).to_markdown().splitlines()[0].split("|") if cell]
    left = {head.strip() for head in heads if not head.startswith("  ")}
    assert left == {"layer", "N×K", "format", "activation", "own row", "backend", "warning"}


def test_the_line_of_totals() -> None:
    lower = replace(FULL, fqn="down", shape=(64, 32), bits_per_weight=9.0, output_sqnr_db=17.0)
    unrun = replace(FULL, fqn="spare", output_sqnr_db=None, bits_per_weight=4.5)
    line = made(FULL, lower, unrun).to_markdown().splitlines()[-1]
    bits = (2 * 4.5 * 8192 + 9.0 * 2048) / (2 * 8192 + 2048)
    assert line == (
        f"3 layers, 1 of them not run; output SQNR min -3.0 dB, mean 7.0 dB; {bits:.2f} bits per weight; quantised layers "
        "12,345 → 6,789 bytes; whole model 1,234,567 → 345,678 bytes"
    )
    assert made().to_markdown().splitlines()[-1] == "0 layers; whole model 1,234,567 → 345,678 bytes"


@pytest.mark.parametrize(
    ("outputs", "lowest", "mean"),
    [
        ((20.0, 10.0), 10.0, 15.0),
        ((20.0, math.inf, 10.0), 10.0, 15.0),
        ((20.0, None), 20.0, 20.0),
        ((math.inf, math.inf), math.inf, math.inf),
        ((None, math.inf), math.inf, math.inf),
        ((20.0, math.nan), math.nan, math.nan),
        ((math.nan, 20.0), math.nan, math.nan),
        ((20.0, -math.inf), -math.inf, -math.inf),
        ((None,), math.nan, math.nan),
        ((), math.nan, math.nan),
    ],
)
def test_lowest_and_mean(outputs: tuple[float | None, ...], lowest: float, mean: float) -> None:
    found = made(*(replace(FULL, output_sqnr_db=v) for v in outputs))
    assert (found.min_sqnr, found.mean_sqnr) == pytest.approx((lowest, mean), nan_ok=True)
    assert math.isnan(found.mean_bits) == (not outputs)


def test_csv_has_a_column_for_each_field() -> None:
    up, output = csv.DictReader(io.StringIO(made(FULL).to_csv()))
    texts = {name: str(value) for name, value in asdict(FULL).items()}
    assert up == texts | {"shape": "128x64", "calls": "1/2"}
    assert {name: cell for name, cell in output.items() if cell} == {
        "fqn": "(model output)",
        "output_sqnr_db": "inf",
        "calls": "0/0",
    }
    assert list(up) == [field.name for field in fields(Row)]


def test_json_holds_each_field_and_total() -> None:
    drift = RouterDrift("experts", 32, 4, 64, 5)
    found = made(replace(FULL, weight_sqnr_db=-math.inf, output_sqnr_db=math.nan), routing=(drift,), caches=(CACHE,))
    data = json.loads(found.to_json(), parse_constant=lambda constant: pytest.fail(constant))
    words = {"weight_sqnr_db": "-inf", "output_sqnr_db": "nan", "shape": [128, 64], "calls": [1, 2]}
    assert data["rows"][0] == asdict(FULL) | words and data["rows"][1]["output_sqnr_db"] == "inf"
    assert data["caches"] == [asdict(CACHE) | {"value_sqnr_db": "inf"}]
    coverage, routing = data["totals"].pop("coverage"), data["totals"].pop("routing")
    assert coverage == found.coverage.to_dict() and routing == [asdict(drift)]
    assert data["totals"] == {
        "layers": 1, "not_run": [], "min_sqnr_db": "nan", "mean_sqnr_db": "nan", "mean_bits_per_weight": 4.5,
        "bytes_before": 12345, "bytes_after": 6789, "model_bytes": [1234567, 345678],
    }  # fmt: skip
    assert "caches" not in json.loads(made(FULL).to_json())


def test_each_field_of_a_cache_has_its_cell() -> None:
    bare = CacheRow("latent", "high precision → q8_0", {}, None, None, None, None, None, "not reached | here")
    cells = table(render.caches([CACHE, bare, replace(CACHE, bytes_equal=False)]).strip())
    assert cells[0] == {
        "KV cache": "attn", "format": "fp8", "scales": "k_scale 0.5 to 2", "bytes per token": "4,096 → 2,048",
        "key dB": "20.0", "value dB": "inf", "bytes equal": "yes", "warning": "",
    }  # fmt: skip
    assert {name: cell for name, cell in cells[1].items() if cell} == {
        "KV cache": "latent",
        "format": "high precision → q8_0",
        "warning": "not reached & here",
    }
    assert cells[2]["bytes equal"] == "no"
    assert render.caches([]) == ""


def test_the_layer_of_experts_that_drifts_most_is_named() -> None:
    """By the share of its tokens, not by their number."""
    many, most = RouterDrift("many", 400, 40, 800, 41), RouterDrift("most", 100, 35, 200, 36)
    assert render.routing([]) == ""
    for layers in ([many, most], [most, many]):
        said = render.routing(layers)
        assert "15.00% of tokens" in said and "over 2 layers" in said
        assert said.endswith("most, 35 of 100 tokens and 36 of 200 choices") and "in most" in said


def drawn(draw: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> tuple[Figure, Axes]:
    """Return the figure that is saved, and its axes."""
    saved: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path: saved.append(self))
    draw()
    (figure,) = saved
    (axes,) = figure.axes
    return figure, axes


def test_bars_of_weight_and_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two a layer, from the top down. inf is hatched to the edge; what was not measured is a word."""
    values = {"a": (20.0, math.inf), "b": (None, -math.inf), "c": (math.nan, -4.0)}
    layers = [replace(FULL, fqn=n, weight_sqnr_db=w, output_sqnr_db=o) for n, (w, o) in values.items()]
    figure, axes = drawn(lambda: render.bars(layers, Path("bars.png")), monkeypatch)
    left, right = axes.get_xlim()
    assert left == -4.0 < 20.0 < right
    bars: list[Any] = list(axes.patches)
    top = bars[3].get_width()
    assert 20.0 < top <= right
    assert [bar.get_width() for bar in bars] == [20.0, 0.0, 0.0, top, -4.0, -4.0]
    assert [bar.get_hatch() or "" for bar in bars] == ["", "", "", "///", "///", ""]
    assert len({bar.get_facecolor() for bar in bars[:3]}) == len({bar.get_facecolor() for bar in bars[3:]}) == 1
    assert bars[0].get_facecolor() != bars[3].get_facecolor()
    spans = sorted((bar.get_y(), bar.get_y() + bar.get_height(), bar.get_y() + bar.get_height() / 2) for bar in bars)
    assert [round(middle) for *_, middle in spans] == [0, 0, 1, 1, 2, 2]
    assert all(one[1] <= other[0] for one, other in pairwise(spans)), "bars overlap"
    assert [bars[i].get_y() < bars[i + 3].get_y() for i in range(3)] == [True] * 3
    bottom_edge, top_edge = axes.get_ylim()
    assert top_edge <= spans[0][0] and spans[-1][1] <= bottom_edge
    texts = [(text.get_text().strip(), text.get_position()[0], text.get_color()) for text in axes.texts]
    black, red = "black", "#b00020"
    assert texts == [
        ("20.0", 20.0, black), ("not measured", 0.0, red), ("nan", 0.0, red),
        ("inf", top, black), ("-inf", 0.0, black), ("-4.0", 0.0, black),
    ]  # fmt: skip
    assert [text.get_position()[1] for text in axes.texts] == pytest.approx(
        [bar.get_y() + bar.get_height() / 2 for bar in bars]
    )
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a  nvfp4", "b  nvfp4", "c  nvfp4"]
    assert list(axes.get_yticks()) == [0, 1, 2]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["weight", "output"]
    assert "hatched" in axes.get_xlabel() and "==" not in axes.get_title()


def test_a_bar_of_what_quantisation_costs_where_all_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = replace(FULL, weight_sqnr_db=math.inf, output_sqnr_db=math.inf)
    layers = [replace(exact, quantisation_db=19.0), replace(exact, quantisation_db=None)]
    figure, axes = drawn(lambda: render.bars(layers, Path("bars.png")), monkeypatch)
    bars: list[Any] = list(axes.patches)
    assert [bar.get_width() for bar in bars] == [19.0, 0.0]
    assert [bar.get_y() + bar.get_height() / 2 for bar in bars] == [0.0, 1.0]
    assert [text.get_text().strip() for text in axes.texts] == ["19.0", "not measured"]
    assert len(figure.legends[0].get_texts()) == 1 and "hatched" not in axes.get_xlabel()
    assert axes.get_title() == render.bit_equal(layers) != ""


def test_small_figures_have_an_axis_of_ten_decibels(monkeypatch: pytest.MonkeyPatch) -> None:
    low = replace(FULL, weight_sqnr_db=1.0, output_sqnr_db=0.5)
    _, axes = drawn(lambda: render.bars([low], Path("bars.png")), monkeypatch)
    assert axes.get_xlim()[0] == 0.0 and 10 < axes.get_xlim()[1] < 15


def test_a_ladder_of_models(monkeypatch: pytest.MonkeyPatch) -> None:
    names, values = ["float", "prepared", "converted"], [10.0, 12.345, 11.0]
    _, axes = drawn(lambda: render.ladder(names, values, "perplexity", "a title", Path("bars.png")), monkeypatch)
    bars: list[Any] = list(axes.patches)
    assert [bar.get_width() for bar in bars] == values
    assert [text.get_text().strip() for text in axes.texts] == ["10.00", "12.35", "11.00"]
    assert [label.get_text() for label in axes.get_yticklabels()] == names and list(axes.get_yticks()) == [0, 1, 2]
    assert axes.get_xlim()[0] == 0 and axes.get_xlim()[1] > max(values)
    bottom_edge, top_edge = axes.get_ylim()
    assert top_edge <= bars[0].get_y() < bars[2].get_y() + bars[2].get_height() <= bottom_edge
    assert "perplexity" in axes.get_xlabel() and axes.get_title() == "a title"


@pytest.mark.parametrize(("module", "package"), [("tabulate", "tabulate"), ("matplotlib.figure", "matplotlib")])
def test_a_missing_package_is_named(module: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    form: dict[str, Callable[[], object]] = {
        "tabulate": made(FULL).to_markdown,
        "matplotlib": lambda: made(FULL).plot("bars.png"),
    }
    with pytest.raises(ImportError, match=rf"this needs {package}: "):
        form[package]()


def test_a_report_without_layers_is_saved_without_a_picture(tmp_path: Path) -> None:
    for _ in range(2):  # into a folder that is there, too
        made(caches=(CACHE,)).save(tmp_path / "new")
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"report.csv", "report.json", "report.md"}
    assert "| attn" in (tmp_path / "new" / "report.md").read_text(encoding="utf-8")
