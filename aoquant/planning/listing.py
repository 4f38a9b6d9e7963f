"""Layers and their problems, as the lines of a message: a model has many layers that are alike."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

SHOWN = 10  # lines of a message


def folded(lines: Iterable[str]) -> list[str]:
    """Lines that differ in the numbers of layers only, as one: "model.layers.*.mlp.up_proj (64, 64): ... (12
    layers)".
    """
    groups: dict[str, list[str]] = {}
    for line in lines:
        groups.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "*", line), []).append(line)
    return [group[0] if len(group) == 1 else f"{line} ({len(group)} layers)" for line, group in groups.items()]


def listed(lines: Iterable[str]) -> str:
    """`first` of the folded lines."""
    return first(folded(lines))


def first(lines: Sequence[str]) -> str:
    """The first lines, each on a line of its own and indented, and how many more there are."""
    more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return "".join(f"\n  {line}" for line in (*lines[:SHOWN], *more))
