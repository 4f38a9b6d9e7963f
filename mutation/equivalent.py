"""Mutants that no test can notice, each with the argument why. They count neither as killed nor as survivors.

A mutant is named by its file and its line before and after, as the results state them, so the list outlives changes elsewhere in a file.
An entry whose line is gone is reported: remove it.
"""

from __future__ import annotations

from typing import NamedTuple


class Equivalent(NamedTuple):
    file: str
    before: str
    after: str
    why: str


EQUIVALENT: list[Equivalent] = []
