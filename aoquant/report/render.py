"""Reports as text and as a picture. Nothing is measured here.

tabulate and matplotlib are asked for when they are needed, by the name of the extra that brings them.
"""

import csv
import importlib
import io
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from aoquant.kv import hook
from aoquant.planning.coverage import Coverage, listed
from aoquant.report.cache_rows import CacheRow
from aoquant.report.routing import RouterDrift, changed_share
from aoquant.report.rows import Row

_HEADS = {
    "fqn": "layer",
    "shape": "N×K",
    "format": "format",
    "activation": "activation",
    "batch_invariant": "own row",
    "bits_per_weight": "bits",
    "weight_sqnr_db": "weight dB",
    "output_sqnr_db": "output dB",
    "input_gradient_sqnr_db": "dx dB",
    "weight_gradient_sqnr_db": "dW dB",
    "backend": "backend",
    "saturated_share": "saturated",
    "floored_share": "floored",
    "bytes": "bytes",
    "warning": "warning",
}
_WORDS = ("fqn", "shape", "format", "activation", "batch_invariant", "backend", "warning")
_COLOURS = ("#4878a8", "#e1812c")


def db(value: float | None) -> str:
    """Decibels for people: "20.5 dB", "inf dB", "not measured"."""
    return "not measured" if value is None else f"{value:.1f} dB"


def markdown(rows: Sequence[Row], totals: dict[str, Any], coverage: Coverage) -> str:
    """Return a table, what stays float, and a line of totals."""
    measured = any(row.input_gradient_sqnr_db is not None for row in rows)
    heads = {name: head for name, head in _HEADS.items() if measured or "gradient" not in name}
    cells = [[_cell(name, getattr(row, name)) for name in heads] for row in rows]
    align = ["left" if name in _WORDS else "right" for name in heads]
    table = _table(cells, list(heads.values()), align)
    before, after = totals["model_bytes"]
    layers = (
        f", {len(totals['not_run'])} of them not run; output SQNR min "
        f"{totals['min_sqnr_db']:.1f} dB, mean {totals['mean_sqnr_db']:.1f} dB; {totals['mean_bits_per_weight']:.2f} bits per "
        f"weight; quantised layers {totals['bytes_before']:,} → {totals['bytes_after']:,} bytes"
    )
    return (
        f"{table}\n\n{coverage}.{_float(coverage)}\n\n{totals['layers']} layers{layers if totals['layers'] else ''}; "
        f"whole model {before:,} → {after:,} bytes"
    )


def caches(rows: Sequence[CacheRow]) -> str:
    """Return a table of KV caches; nothing without one."""
    if not rows:
        return ""
    heads = ("KV cache", "format", "scales", "bytes per token", "key dB", "value dB", "bytes equal", "warning")
    cells = [
        (
            row.fqn, row.format, hook.said(row.scales),
            "" if row.bytes_per_token is None else f"{row.bytes_before:,} → {row.bytes_per_token:,}",
            _cell("key_db", row.key_sqnr_db), _cell("value_db", row.value_sqnr_db),
            "" if row.bytes_equal is None else "yes" if row.bytes_equal else "no", _cell("warning", row.warning),
        )
        for row in rows
    ]  # fmt: skip
    align = ("left", "left", "left", "right", "right", "right", "left", "left")
    return "\n\n" + _table(cells, heads, align)


def _table(cells: Sequence[Any], heads: Sequence[str], align: Sequence[str]) -> str:
    tabulate = need("tabulate", "cli").tabulate
    return tabulate(cells, heads, tablefmt="github", colalign=align, disable_numparse=True)


def routing(layers: Sequence[RouterDrift]) -> str:
    """Return a paragraph on the tokens that go to other experts; nothing without layers."""
    if not layers:
        return ""
    worst = max(layers, key=lambda layer: layer.changed_share)
    return (
        f"\n\nRouter drift: {changed_share(layers):.2%} of tokens change experts over {len(layers)} layers of experts; most in "
        f"{worst.fqn}, {worst.changed} of {worst.tokens} tokens and {worst.moved} of {worst.choices} choices"
    )


def _float(coverage: Coverage) -> str:
    """Return the matrices that stay float, as a list: one line for each reason."""
    reasons = dict.fromkeys(w.about for w in coverage.float_weights)
    lines = [listed([w for w in coverage.float_weights if w.about == reason]) for reason in reasons]
    return "".join([" Matrices that stay float:\n", *(f"\n- {line}" for line in lines)]) if lines else ""


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name == "shape":
        return "×".join(map(str, value))
    if name.endswith("_db"):
        return f"{value:.1f}"
    if name.endswith("_share"):
        return f"{value:.2%}"
    if name == "batch_invariant":
        return "yes" if value else "no"
    if name == "bits_per_weight":
        return f"{value:.2f}"
    return f"{value:,}" if name == "bytes" else str(value).replace("|", "\\|")


def csv_text(rows: Sequence[Row]) -> str:
    """Names of the fields, then one line a row; shape as NxK, calls as A/B, None as nothing."""
    out = io.StringIO()
    writer = csv.DictWriter(out, [f.name for f in fields(Row)], lineterminator="\n")
    writer.writeheader()
    joined = ({"shape": "x".join(map(str, row.shape)), "calls": "/".join(map(str, row.calls))} for row in rows)
    writer.writerows({**asdict(row), **texts} for row, texts in zip(rows, joined, strict=True))
    return out.getvalue()


def json_text(value: Any) -> str:
    """Strict JSON; inf and nan become the strings "inf", "-inf" and "nan"."""
    return json.dumps(_strict(value), indent=1, allow_nan=False, ensure_ascii=False)


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _strict(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def bars(layers: Sequence[Row], path: Path) -> None:
    """Two bars a layer, weight and output SQNR; inf is a hatched bar to the edge, what was not measured is a word.

    Where a prepared model equals the converted one throughout, the title says so, and the one bar of a layer is what
    quantisation costs its weight.
    """
    equal = bit_equal(layers)
    title = equal or "Weight and output SQNR by layer"
    series = {"weight": "weight_sqnr_db", "output": "output_sqnr_db"}
    if equal:
        series = {"weight, quantised against float": "quantisation_db"}
    figures = need("matplotlib.figure", "plot")
    measured = [v for r in layers for s in series.values() if (v := getattr(r, s)) is not None and math.isfinite(v)]
    top, bottom = 1.15 * max(10.0, *measured, 0.0), min(0.0, *measured, 0.0)
    figure = figures.Figure(figsize=(9, min(1.6 + 0.42 * len(layers), 300)), dpi=110, layout="constrained")
    axes = figure.subplots()
    height = 0.76 / len(series)
    for place, (label, name) in enumerate(series.items()):
        for y, row in enumerate(layers):
            value = getattr(row, name)
            known = value is not None and not math.isnan(value)
            width = (top if value > 0 else bottom) if known and math.isinf(value) else value if known else 0.0
            hatch = "///" if known and math.isinf(value) else ""
            middle = y + (place - (len(series) - 1) / 2) * 0.4
            axes.barh(
                middle, width, height, color=_COLOURS[place], hatch=hatch, edgecolor="white",
                label=label if y == 0 else None,
            )  # fmt: skip
            text = " not measured" if value is None else f" {value:.1f}" if not hatch else f" {value}"
            axes.text(max(width, 0.0), middle, text, va="center", fontsize=8, color="black" if known else "#b00020")
    axes.set_yticks(range(len(layers)), [f"{r.fqn}  {r.format}" for r in layers], fontsize=8)
    axes.set_ylim(len(layers) - 0.5, -0.5)
    axes.set_xlim(bottom, top * 1.08)
    axes.set_xlabel(f"SQNR in dB, higher is better{'' if equal else '; hatched to the edge: inf, bit-equal'}")
    axes.set_title(title, fontsize=10)
    figure.legend(loc="outside lower center", ncols=2)
    figure.savefig(path)


def ladder(names: Sequence[str], values: Sequence[float], unit: str, title: str, path: Path) -> None:
    """A bar for each of a few models, with its number; lower is better."""
    figures = need("matplotlib.figure", "plot")
    figure = figures.Figure(figsize=(7, 1.2 + 0.45 * len(names)), dpi=110, layout="constrained")
    axes = figure.subplots()
    bars = axes.barh(range(len(names)), values, 0.7, color=_COLOURS[0])
    axes.bar_label(bars, fmt=" %.2f", fontsize=9)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, 1.12 * max(values))
    axes.set_xlabel(f"{unit}, lower is better")
    axes.set_title(title, fontsize=10)
    figure.savefig(path)


def bit_equal(layers: Sequence[Row]) -> str:
    """Return a sentence that training computed what is deployed; "" where a layer differs, or holds no float weight."""
    found = [v for r in layers for v in (r.weight_sqnr_db, r.output_sqnr_db)]
    ran = [r for r in layers if r.output_sqnr_db is not None]
    if not ran or any(v not in (None, math.inf) for v in found) or all(r.quantisation_db is None for r in layers):
        return ""
    rest = "" if len(ran) == len(layers) else f" that ran; {len(layers) - len(ran)} did not run"
    return f"prepared == converted in all {len(ran)} layer(s) (bit for bit){rest}"


def need(module: str, extra: str) -> Any:
    """Return a module. Raises ImportError: it is missing; names the extra that brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(f"this needs {package}: pip install 'aoquant[{extra}]'") from error
