"""How far other devices and programs were from the converted model, of the committed runs: a table of
docs/evidence/experiments.md, "What is checked of every row", which publish.py writes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aoquant.tools.markdown import table
from experiments.durations import RUNS
from experiments.records import Run, by_run
from experiments.rows import load_all
from experiments.verdicts import quantises_activations

HEADS = (
    "table",
    "weights alone: a page on a CPU, nats a word",
    "with activations",
    "weights alone: exported, all pages",
    "with activations",
)


def checked(results: Path) -> str:
    """Numbers of checks and the largest distance, for each table whose runs are in `results`."""
    lines = []
    for name, file in RUNS.items():
        path = results / f"{file}_runs.jsonl"
        if path.exists():
            found = by_run([json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()])
            lines.append((f"[{name}](../../benchmarks/results/{path.name})", *_cells(found)))
    return table(HEADS, lines)


def _cells(found: Mapping[Run, Mapping[str, Any]]) -> tuple[str, ...]:
    rows = load_all()
    distances: dict[tuple[str, bool], list[float]] = {
        (what, of): [] for what in ("page", "export") for of in (False, True)
    }
    for run, result in found.items():
        if run.stage != "checks" or run.row not in rows or not rows[run.row].recipe:
            continue
        activations = quantises_activations(rows[run.row].recipe)
        if "cpu_nats_a_word" in result:
            distances["page", activations].append(result["cpu_nats_a_word"])
        score = result.get("transformers_word_perplexity")
        if isinstance(score, float):
            trained = found[Run(run.row, "qat", run.loss, run.rate, run.seed)]
            distances["export", activations].append(abs(math.log(score / trained["word_perplexity"])))
    return tuple(f"{len(of)}, at most {max(of):.4f}" if of else "" for of in distances.values())
