"""The rows of the table: a file in configs/ each, named after its row.

    about = "int4 weights in groups of 128"
    kind = "aoquant"        # float, aoquant, torchao, or lora (aoquant's QAT of peft's merged weight)
    recipe = "int4-g128"    # of `aoquant recipes`, or WEIGHT/ACTIVATION; for torchao a name in students.TORCHAO
    headline = true         # its runs come first, and it has five seeds
    against = "torchao-int4-g128"  # compared with that row seed by seed

Everything else has a default below. A wrong key, kind, recipe or reference is a ValueError that names the file, before
any run begins.
"""

from __future__ import annotations

import csv
import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aoquant.integrations.finetune import LOSSES
from aoquant.recipes import get_recipe
from experiments.tricks import TRICKS

CONFIGS = Path(__file__).parent / "configs"
KINDS = ("float", "aoquant", "torchao", "lora")
RATES = {"kl": (3e-5, 1e-4, 3e-4), "ce": (1e-5, 3e-5, 1e-4)}


@dataclass(frozen=True)
class Row:
    """One line of the table.

    losses: in the order of their runs. learning_rates: one is chosen on validation pages, by short runs, from these and
    their neighbours; empty: `RATES` of the loss; a single one is taken as it is. model: which of
    the two models it quantises. compile: decoder layers by torch.compile in training (scores are always eager). graph:
    a training step is one CUDA graph. trick: of `tricks.py`. export: the converted model fits compressed-tensors, and
    is scored from there by transformers alone.
    """

    name: str
    about: str
    kind: str
    recipe: str = ""
    headline: bool = False
    against: str | None = None
    losses: tuple[str, ...] = ("kl", "ce")
    learning_rates: tuple[float, ...] = ()
    seeds: int = 0
    model: str = "dense"
    compile: bool = True
    graph: bool = True
    trick: str = ""
    export: bool = False

    def rates(self, loss: str) -> tuple[float, ...]:
        """Where the search for this loss's learning rate begins, ascending."""
        return self.learning_rates or RATES[loss]


def load(path: Path) -> Row:
    """The row of a file. Raises ValueError naming the file and the key."""
    found: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    known = {field.name for field in dataclasses.fields(Row)} - {"name"}
    if unknown := sorted(found.keys() - known):
        raise ValueError(f"{path}: no key {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    lists = {key: tuple(value) for key, value in found.items() if isinstance(value, list)}
    row = Row(**{"seeds": 5 if found.get("headline") else 3, **found, **lists, "name": path.stem})
    for key, choices in (("kind", KINDS), ("model", ("dense", "moe")), ("trick", TRICKS)):
        if getattr(row, key) not in choices:
            raise ValueError(f"{path}: {key} must be one of {', '.join(choices)}, got {getattr(row, key)!r}")
    if not row.losses or set(row.losses) - set(LOSSES) or row.seeds < 1:
        raise ValueError(f"{path}: needs losses of {', '.join(LOSSES)}, and a seed or more")
    if list(row.learning_rates) != sorted({*row.learning_rates}):
        raise ValueError(f"{path}: learning_rates must ascend, got {list(row.learning_rates)}")
    if row.kind in ("aoquant", "lora"):
        get_recipe(row.recipe)
    if row.kind == "torchao":
        from experiments.students import TORCHAO

        if row.recipe not in TORCHAO:
            raise ValueError(f"{path}: recipe must be one of torchao's {', '.join(TORCHAO)}, got {row.recipe!r}")
    return row


def load_all(folder: Path = CONFIGS) -> dict[str, Row]:
    """All rows, headlines first. Raises ValueError for a row that is compared with one that is not there."""
    rows = [load(path) for path in sorted(folder.glob("*.toml"))]
    found = {row.name: row for row in sorted(rows, key=lambda row: (row.kind != "float", not row.headline))}
    for row in rows:
        if row.against is not None and row.against not in found:
            raise ValueError(f"{folder / row.name}.toml: against names no row, got {row.against!r}")
    return found


def at_rates_of(table: Path, rows: Mapping[str, Row]) -> dict[str, Row]:
    """Rows that a results.csv has a learning rate for: under the table's loss alone, at that rate, which is not
    searched again. Other rows are as they were. Raises ValueError where there is no such file.
    """
    if not table.is_file():
        raise ValueError(f"--rates must be a results.csv, got {str(table)!r}")
    with table.open(encoding="utf-8", newline="") as file:
        lines = [line for line in csv.DictReader(file) if line["rate"]]
    # the line that is published comes last, and counts
    found = {line["row"]: line for line in sorted(lines, key=lambda line: line["published"] == "True")}
    return {
        name: dataclasses.replace(row, losses=(found[name]["loss"],), learning_rates=(float(found[name]["rate"]),))
        if name in found
        else row
        for name, row in rows.items()
    }
