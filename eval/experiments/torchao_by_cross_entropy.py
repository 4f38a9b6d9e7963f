"""torchao's own QAT by cross entropy beside ours: a table of docs/evidence/experiments.md, from the committed runs.

torchao's models are scored twice, as prepared and as converted, since the two may differ; ours are equal. Where its
converted layer did not run, that column is empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from aoquant.tools.markdown import table
from experiments.losses import committed
from experiments.table import Line, difference, spread

HEADS = (
    "row",
    "QAT",
    "seeds",
    "torchao's, prepared",
    "converted",
    "seeds",
    "log perplexity a word less torchao's converted",
)


def published(results: Path) -> str:
    """Of the committed runs."""
    return page(committed(results))


def page(made: Sequence[Line]) -> str:
    """Of the rows that are compared with one of torchao's, where both were trained by cross entropy."""
    trained = [x for x in made if x.loss == "ce" and x.runs]
    theirs = {x.row.name: x for x in trained if x.row.kind == "torchao"}
    return table(HEADS, [_cells(x, theirs[x.row.against]) for x in trained if x.row.against in theirs])


def _cells(ours: Line, theirs: Line) -> tuple[str, ...]:
    scores = [] if theirs.as_prepared else list(theirs.perplexities.values())
    prepared = mean(run.get("prepared_word_perplexity", run["word_perplexity"]) for run in theirs.runs.values())
    apart = difference(ours.perplexities, theirs.perplexities)
    return (
        f"`{ours.row.name}`",
        spread(list(ours.perplexities.values()), ".2f"),
        str(len(ours.runs)),
        f"{prepared:.2f}",
        spread(scores, ".2f"),
        str(len(theirs.runs)),
        "" if apart is None or not scores else str(apart),
    )
