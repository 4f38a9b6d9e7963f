"""Report what calibrated PTQ did to each layer."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from aoquant._messages import listed


@dataclass(frozen=True)
class PTQRow:
    """Hold one layer, or one stack of experts, whose errors are means over the tokens of its experts.

    tokens: rows of its input that the codes were chosen on. error, nearest: squared error of its output over the
    output's square, of its codes and of rounding to the nearest. damping: what the Gram matrix needed. note: what is
    unusual, or "". few: 1 where it saw fewer tokens than it has inputs; of a stack, the experts that saw too few.
    """

    layer: str
    format: str
    tokens: int
    error: float
    nearest: float
    damping: float
    note: str = ""
    few: int = 0


@dataclass(frozen=True)
class PTQReport:
    """Rows in the order of the layers' turn. `str` is a table with one line for each kind of layer."""

    rows: Sequence[PTQRow] = field(default_factory=list)

    @property
    def notes(self) -> list[str]:
        """Return lines about layers that are unusual."""
        return [f"{row.layer}: {row.note}" for row in self.rows if row.note]

    def __str__(self) -> str:
        kinds: dict[tuple[str, str], list[PTQRow]] = {}
        for row in self.rows:
            kinds.setdefault((row.layer.rpartition(".")[2], row.format), []).append(row)
        lines = ["| layers | number | format | error / nearest's |", "|---|---|---|---|"]
        for (name, format), rows in kinds.items():
            nearest = sum(r.nearest for r in rows)
            ratio = f"{sum(r.error for r in rows) / nearest:.2f}" if nearest else "-"
            lines.append(f"| {name} | {len(rows)} | {format} | {ratio} |")
        return "\n".join(lines) + listed(self.notes)
