"""Markdown that programs write: tables and wrapped paragraphs."""

import textwrap
from collections.abc import Sequence

WIDTH = 120  # characters of a line of prose


def table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; an empty cell is one space."""
    every = [heads, ("---",) * len(heads), *lines]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |").replace("|  |", "| |") for line in every)


def wrapped(words: str, width: int = WIDTH) -> str:
    """Return a paragraph of lines of at most `width` characters, broken at spaces alone."""
    return "\n".join(textwrap.wrap(words, width, break_long_words=False, break_on_hyphens=False))
