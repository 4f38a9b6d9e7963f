"""aoquant/tools/measured.csv: what was measured of a model, beside what was measured of the others."""

from __future__ import annotations

import csv
from pathlib import Path

from aoquant.tools import choosing

MODELS = ("first", "second", "moe")  # in the order of the file: `choosing.measured` takes the first that has a recipe


def remember(made: Path, kept: Path, model: str) -> None:
    """Replace the lines of a model in `kept` by those of `made`, which names none, where a choice has such a recipe."""
    (comment,), new = _read(made)
    if not {row["recipe"] for row in new} & {choice.recipe for choice in choosing.CHOICES}:
        return
    comments, rows = _read(kept)
    about = dict(line.split(": ", 1) for line in comments) | {model: comment}
    rows = [row for row in rows if row["model"] != model] + [{**row, "model": model} for row in new]
    with kept.open("w", newline="", encoding="utf-8") as file:
        file.writelines(f"# {name}: {about[name]}\n" for name in MODELS if name in about)
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(rows, key=lambda row: MODELS.index(row["model"])))
    choosing.measured.cache_clear()


def _read(file: Path) -> tuple[list[str], list[dict[str, str]]]:
    """(comments, rows)."""
    lines = file.read_text(encoding="utf-8").splitlines()
    comments = [line.removeprefix("# ") for line in lines if line.startswith("#")]
    return comments, list(csv.DictReader(line for line in lines if not line.startswith("#")))
