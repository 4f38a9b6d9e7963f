"""Cross entropy beside distillation: a table of docs/experiments.md, from the committed runs of the second model.

Both losses begin at the same weights and read the same text in the same order. A row is compared over the seeds that
both have.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from aoquant.tools.markdown import table
from experiments.costs import MODEL
from experiments.records import by_run
from experiments.rows import load_all
from experiments.table import Line, lines

HEADS = ("row", "PTQ", "cross entropy", "distillation", "seeds", "cross entropy less distillation, validation pages")


def published(results: Path) -> str:
    """Of the committed runs."""
    text = (results / f"experiments_{MODEL}_runs.jsonl").read_text(encoding="utf-8")
    return page(lines(load_all(), by_run([json.loads(line) for line in text.splitlines()])))


def page(made: Sequence[Line]) -> str:
    """Of aoquant's rows that were trained by both losses, without a trick."""
    trained = [line for line in made if line.runs and line.row.kind == "aoquant" and not line.row.trick]
    by_row = {line.row.name: {x.loss: x for x in trained if x.row is line.row} for line in trained}
    return table(HEADS, [_cells(name, of["ce"], of["kl"]) for name, of in by_row.items() if of.keys() == {"ce", "kl"}])


def _cells(name: str, ce: Line, kl: Line) -> tuple[str, ...]:
    seeds = sorted(ce.runs.keys() & kl.runs.keys())
    scores = [f"{mean(line.perplexities[seed] for seed in seeds):.2f}" for line in (ce, kl)]
    validation = mean(math.log(ce.validation()[seed] / kl.validation()[seed]) for seed in seeds)
    return f"`{name}`", "" if ce.ptq is None else f"{ce.ptq:.2f}", *scores, str(len(seeds)), f"{validation:+.4f}"
