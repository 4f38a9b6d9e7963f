"""Cross entropy beside distillation: a table of docs/evidence/experiments.md, from the committed runs.

Both losses begin at the same weights and read the same text in the same order. A row is compared over the seeds that
both have. Validation pages choose between the two; where zero is within the difference's 95 % interval, they do not.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from aoquant.tools.markdown import table
from experiments.records import by_run
from experiments.rows import load_all
from experiments.table import LOSS_IN_WORDS, Line, difference, lines

HEADS = ("row", "PTQ", LOSS_IN_WORDS["ce"], LOSS_IN_WORDS["kl"], "seeds", "validation pages, a token", "which choose")


def published(results: Path) -> str:
    """Of the committed runs."""
    return page(committed(results))


def committed(results: Path) -> list[Line]:
    """The main model's table, from its committed runs."""
    text = (results / "experiments_runs.jsonl").read_text(encoding="utf-8")
    return lines(load_all(), by_run([json.loads(line) for line in text.splitlines()]))


def page(made: Sequence[Line]) -> str:
    """Of aoquant's rows that were trained by both losses, LoRA's among them, without a trick."""
    trained = [x for x in made if x.runs and x.row.kind in ("aoquant", "lora") and not x.row.trick]
    by_row = {line.row.name: {x.loss: x for x in trained if x.row is line.row} for line in trained}
    return table(HEADS, [_cells(name, of["ce"], of["kl"]) for name, of in by_row.items() if of.keys() == {"ce", "kl"}])


def _cells(name: str, ce: Line, kl: Line) -> tuple[str, ...]:
    seeds = sorted(ce.runs.keys() & kl.runs.keys())
    scores = [f"{mean(line.perplexities[seed] for seed in seeds):.2f}" for line in (ce, kl)]
    on_validation = difference(ce.validation(), kl.validation())
    assert on_validation is not None
    reach = f" ± {on_validation.reach:.4f}" if on_validation.seeds > 1 else ""
    chosen = LOSS_IN_WORDS["ce" if on_validation.mean < 0 else "kl"] if on_validation.told_apart else ""
    ptq = "" if ce.ptq is None else f"{ce.ptq:.2f}"
    return f"`{name}`", ptq, *scores, str(len(seeds)), f"{on_validation.mean:+.4f}{reach}", chosen
