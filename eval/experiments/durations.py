"""Seconds that the committed runs took: a table of docs/evidence/experiments.md, which publish.py writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aoquant.tools.markdown import table

RUNS = {"main": "experiments", "earlier": "experiments_earlier", "experts": "experiments_moe"}
HEADS = ("table", "a run by KL", "torchao's, not compiled", "two scores")


def durations(results: Path) -> str:
    """From the least to the most of each table whose runs are in `results`."""
    lines = []
    for name, file in RUNS.items():
        path = results / f"{file}_runs.jsonl"
        if path.exists():
            runs = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            lines.append((f"[{name}](../../benchmarks/results/{path.name})", *_cells(runs)))
    return table(HEADS, lines)


def _cells(runs: Sequence[dict[str, Any]]) -> tuple[str, str, str]:
    whole = [line for line in runs if line["run"]["stage"] == "qat"]
    by_kl = [line for line in whole if line["run"]["loss"] == "kl"]
    torchao = [line for line in by_kl if line["run"]["row"].startswith("torchao-")]
    ours = [line for line in by_kl if line not in torchao]
    return _range(ours, "train_seconds"), _range(torchao, "train_seconds"), _range(whole, "score_seconds")


def _range(lines: Sequence[dict[str, Any]], key: str) -> str:
    seconds = [line["result"][key] for line in lines if key in line["result"]]
    return f"{min(seconds):.1f} to {max(seconds):.1f}" if seconds else ""
