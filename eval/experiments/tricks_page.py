"""What the tricks of `tricks.py` were worth, on both dense models: a table of docs/evidence/experiments.md.

A trick is kept if it wins over the plain row on validation pages, over its three seeds; test pages choose nothing.
"""

from __future__ import annotations

import csv
from pathlib import Path

from aoquant.tools.markdown import table

TABLES = ("experiments", "experiments_earlier")  # this model's, the earlier one's
ON_VALIDATION, ON_TEST = "validation, log less the other's", "log perplexity less the other's"
HEADS = (
    "trick", "without it", "validation, a token", "test, a word", "earlier model: validation, a token", "test, a word",
)  # fmt: skip


def published(results: Path) -> str:
    """Of the committed tables: differences of log perplexity, below zero where the trick wins, with their 95 %
    intervals; "better" or "worse" where the interval does not hold zero.
    """
    made = [_tricks(results / f"{name}.csv") for name in TABLES]
    rows = list(dict.fromkeys(name for found in made for name in found))
    against = {name: row["against"] for found in made for name, row in found.items()}
    cells = [[_cell(found.get(name), key) for found in made for key in (ON_VALIDATION, ON_TEST)] for name in rows]
    return table(HEADS, [(f"`{name}`", f"`{against[name]}`", *shown) for name, shown in zip(rows, cells, strict=True)])


def _tricks(file: Path) -> dict[str, dict[str, str]]:
    """Rows with a trick that were trained, by name."""
    if not file.is_file():
        return {}
    with file.open(encoding="utf-8", newline="") as lines:
        return {row["row"]: row for row in csv.DictReader(lines) if row["trick"] and row["QAT"]}


def _cell(row: dict[str, str] | None, key: str) -> str:
    """The difference, less what has a column of its own, or is told of all of them."""
    return "" if row is None else row[key].removeprefix(f"{row['against']}: ").removesuffix(": not told apart")
