"""What a call takes from the runs in OUT where it is not told: the budget, and for a table without a model all else.

`--tokens`, `--batch`, `--block`, `--search` and `--documents` are None where they were not given.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.records import Records, distinct

TOKENS, BATCH, BLOCK, SEARCH = 15_000_000, 16, 1024, 0.2  # where neither the options nor the runs in OUT have others
BUDGET = ("steps", "search_steps", "batch", "block", "documents")
EVERY = ("model", "text", "validation", *BUDGET, "train")


def budget(o: argparse.Namespace, runs: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Of the options; without --text that of the runs with these settings, if these options are of one budget.

    Raises:
        ValueError: they are of several.
    """
    there = [] if o.text else distinct(runs, settings, BUDGET)
    found = [other for other in there if fits(o, other)]
    if len(found) > 1:
        raise ValueError(f"--out {o.out} has runs of {listed(found)}: give one of these")
    try:
        return found[0] if found else of_options(o)
    except ValueError as error:
        raise ValueError(f"{error}; --out {o.out} has runs of {listed(there)}" if there else str(error)) from error


def of_options(o: argparse.Namespace) -> dict[str, Any]:
    """With the defaults. Raises ValueError for less than a step."""
    batch, block, tokens = o.batch or BATCH, o.block or BLOCK, o.tokens or TOKENS
    if tokens < batch * block:
        raise ValueError(f"--tokens must be at least a step of --batch {batch} times --block {block}, got {tokens}")
    steps = round(tokens / (batch * block))
    search_steps = max(1, round((o.search or SEARCH) * steps))
    return dict(zip(BUDGET, (steps, search_steps, batch, block, o.documents), strict=True))


def fits(o: argparse.Namespace, settings: Mapping[str, Any]) -> bool:
    """Whether runs of these settings are of the budget that the options name."""
    steps, batch, block = (settings[name] for name in ("steps", "batch", "block"))
    return (
        (o.batch or batch, o.block or block, o.documents or settings["documents"])
        == (batch, block, settings["documents"])
        and (o.tokens is None or round(o.tokens / (batch * block)) == steps)
        and (o.search is None or max(1, round(o.search * steps)) == settings["search_steps"])
    )  # fmt: skip


def listed(budgets: Sequence[Mapping[str, Any]]) -> str:
    """The options that name these budgets."""
    return " and of ".join(_options(budget) for budget in budgets)


def _options(budget: Mapping[str, Any]) -> str:
    tokens, share = budget["steps"] * budget["batch"] * budget["block"], budget["search_steps"] / budget["steps"]
    said = f"--tokens {tokens} --batch {budget['batch']} --block {budget['block']}"
    said += f" --search {share:g}" * (round(SEARCH * budget["steps"]) != budget["search_steps"])
    return said + (f" --documents {budget['documents']}" if budget["documents"] else "")


def known_records(o: argparse.Namespace, runs: Path, rows: Sequence[str]) -> Records | None:
    """The runs of these rows, with whatever settings they have; None where there are none.

    Raises:
        ValueError: they have several settings.
    """
    found = [settings for settings in distinct(runs, {}, EVERY, rows) if fits(o, settings)]
    if len(found) > 1:
        raise ValueError(f"--out {o.out} has runs of {len(found)} settings: give --model, --wikitext and the budget")
    return Records(runs, found[0], o.device, o.commit) if found else None
