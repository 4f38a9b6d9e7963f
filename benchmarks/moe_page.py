"""docs/evidence/results.md's table of experts, from results/moe.csv.

    python benchmarks/moe_page.py      # writes the table between the page's two marks

A cell is the newest measured row of benchmarks/moe.py for its shape, part and number of tokens, so a table can join
runs of different days; the line above it names all of their dates. A training step is a time over bf16's, the packed
products are a speed over bf16's.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from scaling import RESULTS, ROOT, Rows, newest, read

from aoquant.tools.markdown import table, wrapped

RECIPE = "int4-g32"
SHAPES = {"qwen3-30b-a3b": "Qwen3-30B-A3B", "gpt-oss-20b": "gpt-oss-20b", "mixtral": "Mixtral"}
TRAINED, SERVED = "8192", ("1", "16", "64", "4096")  # tokens


def page(rows: Rows) -> str:
    """The table with the line above it. Raises ValueError where a cell was not measured."""
    used = list[Mapping[str, str]]()

    def cell(column: str, **wanted: str) -> str:
        row = newest(rows, variant=RECIPE, **wanted)
        if row is None:
            raise ValueError(f"results/moe.csv has no measured row with {wanted}: run benchmarks/moe.py")
        used.append(row)
        return f"{float(row[column]):.2f}".removeprefix("0")

    lines = [
        [
            name,
            cell("of_bf16_time", shape=shape, part="train", what="block", tokens=TRAINED),
            *(cell("speed", shape=shape, part="decode", what="products", tokens=n) for n in SERVED),
        ]
        for shape, name in SHAPES.items()
    ]
    heads = [f"`{RECIPE}` experts of", f"training step, {TRAINED} tokens, time"]
    heads += [f"packed, speed: {SERVED[0]} token", *SERVED[1:]]
    devices, dates = (
        ", ".join(sorted({row[column][:length] for row in used})) for column, length in (("gpu", None), ("date", 10))
    )
    words = (
        f"Blocks of three models' shapes, over bf16 with `torch._grouped_mm`. {devices}, {dates}, `python benchmarks/moe.py` "
        "([rows](../../benchmarks/results/moe.csv), [all tables and what holds them back](../moe.md#all-experts-at-once)):"
    )
    return f"{wrapped(words)}\n\n{table(heads, lines)}"


def main() -> int:
    sys.path.insert(0, str(ROOT / "eval"))
    import pages

    pages.between(ROOT / "docs" / "evidence" / "results.md", "moe", page(read(RESULTS / "moe.csv")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
