"""Results on disk: OUT/runs.jsonl, a line for every run that ended, appended at once and never changed.

The file can be carried away and brought back, and files of two machines can be joined with `cat`: a run counts once,
and only beside runs of the same settings: budget, model, and the texts that are trained on, chosen by and scored.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from provenance import provenance

from experiments.rows import Row

LADDER = (1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)  # where a row's own rates are not enough


@dataclass(frozen=True)
class Run:
    """What a line is about. stage: "float", "ptq", "search", "qat", "checks" (of the model of that "qat"),
    "cost" (of training) or "generate".
    loss, rate, seed: of "search", "qat" and "checks" alone.
    """

    row: str
    stage: str
    loss: str = ""
    rate: float = 0.0
    seed: int = 0

    def __str__(self) -> str:
        how = f" {self.loss} {self.rate:g} seed {self.seed}" if self.stage in ("search", "qat", "checks") else ""
        return f"{self.row} {self.stage}{how}"


def float_run(row: Row) -> Run:
    """The score of the float model that a row quantises."""
    return Run("bf16" if row.model == "dense" else "bf16-moe", "float")


class Records:
    """The lines of a file that have these settings. settings: by name, in JSON's types. device: where runs are made.
    commit: of the code that makes them.
    """

    def __init__(self, file: Path, settings: Mapping[str, Any], device: str, commit: str = "") -> None:
        self.file, self.settings, self.device, self.commit = file, dict(settings), device, commit

    def read(self) -> dict[Run, dict[str, Any]]:
        """All results, by run; the first line of a run counts."""
        return by_run(self._lines())

    def made(self) -> dict[str, str]:
        """Devices, versions and commits, "none" with the number of lines where some name none, and the first and last
        day.
        """
        about = [content["made"] for content in self._lines()]
        found = {}
        for key in ("device", "torch", "commit"):
            values = list(dict.fromkeys(line[key] for line in about if key in line))
            without = sum(key not in line for line in about)
            found[key] = ", ".join([*values, *([f"none ({without} lines)"] if without else [])])
        days = sorted({line["date"][:10] for line in about})
        return found | {"date": " to ".join(dict.fromkeys((days[0], days[-1]))) if days else ""}

    def parameters(self) -> int | None:
        """Of the model; None where the runs are older than 2026-11-24, which did not keep it."""
        sizes = (result["parameters"] for result in self.read().values() if "parameters" in result)
        return next(sizes, None)

    def _lines(self) -> list[dict[str, Any]]:
        return [content for content in _read(self.file) if content["settings"] == self.settings]

    def add(self, run: Run, result: Mapping[str, Any]) -> None:
        """Append a result; processes may do so at the same time."""
        about = provenance(self.device)
        made = {"device": about["device"], "date": about["date"], "torch": about["versions"]["torch"]}
        made |= {"commit": self.commit} if self.commit else {}
        content = {"run": vars(run), "settings": self.settings, "made": made, "result": dict(result)}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(json.dumps(content) + "\n")


def by_run(lines: Sequence[Mapping[str, Any]]) -> dict[Run, dict[str, Any]]:
    """The results of lines; the first line of a run counts."""
    found: dict[Run, dict[str, Any]] = {}
    for content in lines:
        found.setdefault(Run(**content["run"]), content["result"])
    return found


def _read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def distinct(
    file: Path, settings: Mapping[str, Any], names: Sequence[str], rows: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """What the lines of a file that have these settings, and are of these rows, have by these names; each once."""
    found = []
    for line in _read(file):
        have = line["settings"]
        of_these = {**have, **settings} == have and have.keys() >= {*names}
        if of_these and (rows is None or line["run"]["row"] in rows):
            found.append({name: have[name] for name in names})
    return [value for i, value in enumerate(found) if value not in found[:i]]


def searched(found: Mapping[Run, Mapping[str, Any]], row: str, loss: str) -> dict[float, float]:
    """Loss on validation pages of every learning rate that a short run tried, by rate in ascending order."""
    tried = {
        run.rate: float(result["validation_loss"])
        for run, result in found.items()
        if (run.row, run.stage, run.loss) == (row, "search", loss)
    }
    return dict(sorted(tried.items()))


def next_rate(tried: Mapping[float, float], rates: tuple[float, ...]) -> float | None:
    """The learning rate to try next; None when the search is over.

    tried: as `searched` returns them. The row's own rates come first. While the best one tried is the lowest or the
    highest, the next of `LADDER` in that direction follows. A row with one rate has no search.
    """
    if len(rates) == 1:
        return None
    if left := [rate for rate in rates if rate not in tried]:
        return left[0]
    best, among = min(tried, key=lambda rate: tried[rate]), list(tried)
    lower, higher = [r for r in LADDER if r < best], [r for r in LADDER if r > best]
    if best == among[0] and lower:
        return lower[-1]
    return higher[0] if best == among[-1] and higher else None


def chosen_rate(found: Mapping[Run, Mapping[str, Any]], row: str, loss: str, rates: tuple[float, ...]) -> float | None:
    """The learning rate whose short run has the lowest loss on validation pages; None while the search goes on."""
    tried = searched(found, row, loss)
    if next_rate(tried, rates) is not None:
        return None
    return min(tried, key=lambda rate: tried[rate]) if len(rates) > 1 else rates[0]
