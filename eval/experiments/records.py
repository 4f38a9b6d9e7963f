"""Results on disk: OUT/runs.jsonl, a line for every run that ended, appended at once and never changed.

The file can be carried away and brought back, and files of two machines can be joined with `cat`: a run counts once,
and only beside runs of the same settings (budget, model, text).
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.rows import Row


@dataclass(frozen=True)
class Run:
    """What a line is about. stage: "float", "ptq", "qat" or "cost". loss, rate, seed: of "qat" alone."""

    row: str
    stage: str
    loss: str = ""
    rate: float = 0.0
    seed: int = 0

    def __str__(self) -> str:
        how = f" {self.loss} {self.rate:g} seed {self.seed}" if self.stage == "qat" else ""
        return f"{self.row} {self.stage}{how}"


def float_run(row: Row) -> Run:
    """The score of the float model that a row quantises."""
    return Run("bf16" if row.model == "dense" else "bf16-moe", "float")


class Records:
    """The lines of a file that have these settings. settings: by name, in JSON's types."""

    def __init__(self, file: Path, settings: Mapping[str, Any]) -> None:
        self.file, self.settings = file, dict(settings)

    def read(self) -> dict[Run, dict[str, Any]]:
        """All results, by run; the first line of a run counts."""
        found: dict[Run, dict[str, Any]] = {}
        lines = self.file.read_text(encoding="utf-8").splitlines() if self.file.exists() else []
        for line in lines:
            content = json.loads(line)
            if content["settings"] == self.settings:
                found.setdefault(Run(**content["run"]), content["result"])
        return found

    def add(self, run: Run, result: Mapping[str, Any]) -> None:
        """Append a result; processes may do so at the same time."""
        content = {"run": vars(run), "settings": self.settings, "result": dict(result)}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(json.dumps(content) + "\n")


def chosen_rate(found: Mapping[Run, Mapping[str, Any]], row: str, loss: str, rates: tuple[float, ...]) -> float | None:
    """The learning rate whose run of seed 0 has the lowest loss on validation pages; None while one is missing."""
    runs = {rate: found.get(Run(row, "qat", loss, rate, 0)) for rate in rates}
    if any(result is None for result in runs.values()):
        return None
    return min(rates, key=lambda rate: runs[rate]["validation_loss"])  # type: ignore[index]
