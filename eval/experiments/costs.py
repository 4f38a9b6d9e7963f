"""What a row cost, over bf16's: columns of the tables, from the lines that `cost.py` wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from aoquant.tools.markdown import table
from experiments.records import Run, by_run

FLOAT = "bf16"  # its float row


class Cost(NamedTuple):
    """Cells. training: tokens/s over bf16's; memory: peak of training over bf16's; megabytes: of the converted model;
    generate: tokens/s over bf16's. "" where not measured.
    """

    training: str = ""
    memory: str = ""
    megabytes: str = ""
    generate: str = ""


HEADS = Cost("training, speed", "memory", "MB", "generate, speed")


def cost_of(found: Mapping[Run, Mapping[str, Any]], row: str, float_row: str) -> Cost:
    """Of a row, beside its float model."""
    trained, bf16 = (found.get(Run(name, "cost"), {}) for name in (row, float_row))
    served = found.get(Run(row, "generate"), {})

    def over(a: float | None, b: float | None) -> str:
        return f"{a / b:.2f}" if a and b else ""

    return Cost(
        over(trained.get("train_tokens_s"), bf16.get("train_tokens_s")),
        over(trained.get("peak_bytes"), bf16.get("peak_bytes")),
        f"{served['model_bytes'] / 1e6:.1f}" if "model_bytes" in served else "",
        over(served.get("tokens_s"), served.get("bf16_tokens_s")),
    )


def published(results: Path) -> dict[str, Cost]:
    """By row, of the committed runs; empty where there are none."""
    file = results / "experiments_runs.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    found = by_run([json.loads(line) for line in lines])
    rows = dict.fromkeys(run.row for run in found if run.stage in ("cost", "generate"))
    return {row: cost_of(found, row, FLOAT) for row in rows}


def page(costs: Mapping[str, Cost]) -> str:
    """The table of docs/evidence/experiments.md."""
    return table(("row", *HEADS), [(f"`{row}`", *cost) for row, cost in costs.items() if row != FLOAT])
