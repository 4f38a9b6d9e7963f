"""How much of a row the program that encodes it holds at once, where the row has a scale of its own.

A program that holds the whole row reads it once, which is the fastest for a few rows. Many programs that hold long rows
leave no room for a second one on their multiprocessor, so nothing is read while they write. Programs that hold a piece
read the row twice, the second time from the L2 cache: 8192 rows of 14336 or 11008 take .5 to .8 of the time, and as
long where they have 8192 (benchmarks/results/long_rows.txt).
"""

from __future__ import annotations

import triton

MANY = 256  # rows, about two for each multiprocessor
PIECE = 4096  # values of one of many rows


def row_width(rows: int, k: int, longest: int) -> int:
    """Values of each of `rows` rows of k, a power of two; at most `longest`. Fewer than k: the row is read twice."""
    return min(triton.next_power_of_2(k), longest if rows < MANY else PIECE)
