"""Markdown that programs write: tables, wrapped paragraphs, and the part of a page that stands between two marks.

A page that holds measured numbers has them between `<!-- NAME -->` and `<!-- end of NAME -->`; the program that writes
NAME's part replaces all of it, so no number is typed by hand.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

WIDTH = 120  # characters of a line of prose


def table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table; an empty cell is one space."""
    every = [heads, ("---",) * len(heads), *lines]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |").replace("|  |", "| |") for line in every)


def wrapped(words: str) -> str:
    """A paragraph of lines of at most `WIDTH` characters, broken at spaces alone."""
    return "\n".join(textwrap.wrap(words, WIDTH, break_long_words=False, break_on_hyphens=False))


def between(page: Path, name: str, content: str) -> None:
    """Replace what stands between the marks of `name` in a page.

    Raises:
        ValueError: the page does not have both marks.
    """
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, begun, rest = page.read_text(encoding="utf-8").partition(begin)
    _, ended, after = rest.partition(end)
    if not begun or not ended:
        raise ValueError(f"{page} must have the lines {begin} and {end}")
    page.write_text(f"{before}{begin}\n\n{content}\n\n{end}{after}", encoding="utf-8")
