"""Time something beside its bf16 twin: what benchmarks/model.py does with each of its variants.

A cell is one kind of run of one model (a training step, a call of `generate`, ...). Its bf16 twin is made once; each
variant is made, warmed up, timed in turns with the twin, and freed before the next one. A ratio is therefore taken
between runs of the same seconds, and a clock that drifts drifts for both. The first row is the twin beside itself: its
ratio is the noise. Where two models do not fit into memory ("alone"), the twin is timed and freed before a variant is
made, and its row is the twin made once more.

Memory is what a run allocates at most beyond what lived before its model was made: weights, gradients and optimiser
included, the twin excluded. A CPU has no such counter; the column is empty there.
"""

from __future__ import annotations

import csv
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from llamas import BASE
from record_golden import versions

Row = dict[str, Any]
Run = Callable[[], Any]
Clock = Callable[[Run, int, torch.device], float]  # run, repeats, device -> seconds of one run
TIMED = (
    "ms_p20",
    "ms",
    "ms_p80",
    "bf16_ms",
    "of_bf16_time",
    "speed",
    "tokens_per_s",
    "peak_MiB",
    "of_bf16_peak",
    "note",
)


@dataclass
class Deadline:
    """Seconds after which nothing new begins; 0: never."""

    seconds: float
    start: float = field(default_factory=time.monotonic)

    @property
    def passed(self) -> bool:
        return self.seconds > 0 and time.monotonic() - self.start > self.seconds


def percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    """20th, 50th and 80th."""
    t = torch.tensor(values, dtype=torch.float64)
    p20, p50, p80 = (t.quantile(q).item() for q in (0.2, 0.5, 0.8))
    return p20, p50, p80


def wait(device: torch.device) -> None:
    """Until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def allocated(device: torch.device) -> int:
    """Bytes of live tensors on a GPU; 0 on a CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def free(device: torch.device) -> None:
    """Give back what nothing refers to."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def seconds(run: Run, repeats: int, device: torch.device) -> float:
    """Of one run, from an idle device to an idle device."""
    wait(device)
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    wait(device)
    return max(time.perf_counter() - start, 1e-6) / repeats  # some clocks stand still for milliseconds


def kernel_seconds(run: Run, repeats: int, device: torch.device) -> float:
    """Return what the kernels and copies of one run take on a GPU, without the gaps between them.

    The profiler that tells stays in the process and slows down every launch: nothing else is timed there.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            run()
        wait(device)
    on_gpu = (e.device_time_total for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA)
    return sum(on_gpu) / 1e6 / repeats


@dataclass(frozen=True)
class Cell:
    """Describe one kind of run.

    named: the columns that tell its rows from other cells' rows. ready: variant -> what is timed, which keeps its model
    alive. tokens: how many one run makes or reads. repeats: runs between two looks at the clock. alone: whether the
    twin is freed before a variant is made. clock: what times a run.
    """

    named: Row
    ready: Callable[[str], Run]
    tokens: int
    rounds: int
    device: torch.device
    warm_up: int = 2
    repeats: int = 1
    alone: bool = False
    clock: Clock = seconds


def warm(cell: Cell, variant: str) -> tuple[Run, float | None]:
    """(a run that is compiled and warm; MiB that it holds at most)."""
    free(cell.device)
    floor = allocated(cell.device)
    run = cell.ready(variant)
    for _ in range(cell.warm_up):
        run()
    if cell.device.type != "cuda":
        return run, None
    wait(cell.device)
    torch.cuda.reset_peak_memory_stats(cell.device)
    run()
    wait(cell.device)
    return run, (torch.cuda.max_memory_allocated(cell.device) - floor) / 2**20


def in_turns(first: Run, second: Run, cell: Cell) -> tuple[list[float], list[float]]:
    """Seconds of both, round by round; every other round begins with the second."""
    times: tuple[list[float], list[float]] = ([], [])
    for round_ in range(cell.rounds):
        for which in (0, 1) if round_ % 2 == 0 else (1, 0):
            times[which].append(cell.clock((first, second)[which], cell.repeats, cell.device))
    return times


def by_itself(run: Run, cell: Cell) -> list[float]:
    """Seconds, round by round."""
    return [cell.clock(run, cell.repeats, cell.device) for _ in range(cell.rounds)]


def reason(error: BaseException) -> str:
    """One line of an exception."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160] or 'no message'}"


def measured(cell: Cell, variants: Sequence[str], deadline: Deadline) -> Iterator[Row]:
    """A row for bf16 and for each variant; one that raises, or comes too late, has a note instead of numbers."""
    base: Run | None = None
    theirs: list[float] = []
    late = deadline.passed
    if not late:
        base, base_peak = warm(cell, BASE)
        if cell.alone:
            theirs, base = by_itself(base, cell), None
    for variant in (BASE, *variants):
        row = {**cell.named, "variant": variant, **dict.fromkeys(TIMED, "")}
        if late or deadline.passed:
            yield row | {"note": "not run: out of time"}
            continue
        run: Run | None = None
        try:
            if base is None:
                run, peak = warm(cell, variant)
                mine = by_itself(run, cell)
            else:
                run, peak = (base, base_peak) if variant == BASE else warm(cell, variant)
                theirs, mine = in_turns(base, run, cell)
            p20, p50, p80 = percentiles(mine)
            of_time = percentiles([m / t for m, t in zip(mine, theirs, strict=True)])[1]
            row |= {"ms_p20": p20 * 1e3, "ms": p50 * 1e3, "ms_p80": p80 * 1e3, "bf16_ms": percentiles(theirs)[1] * 1e3,
                    "of_bf16_time": of_time, "speed": 1 / of_time, "tokens_per_s": cell.tokens / p50}  # fmt: skip
            if peak is not None and base_peak is not None:
                row |= {"peak_MiB": peak, "of_bf16_peak": peak / base_peak}
        except Exception as error:  # whatever a library or a GPU raises: the other variants go on
            row["note"] = reason(error)
        del run
        yield row


@dataclass
class Table:
    """Rows, printed as they come and appended to a file that names GPU, versions, command and date in each of them."""

    file: Path
    device: torch.device
    silent: bool = False

    def add(self, row: Row) -> None:
        if self.silent:
            return
        print("  ".join(f"{k} {_short(v)}" for k, v in row.items() if v != ""), flush=True)
        whole = {k: _short(v) for k, v in (versions(self.device) | row).items()}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        new = not self.file.exists()
        if not new:
            with self.file.open(newline="") as file:
                columns = next(csv.reader(file))
            if columns != list(whole):
                raise ValueError(
                    f"{self.file} has other columns ({', '.join(columns)}): move it away, or use another --out"
                )
        with self.file.open("a", newline="") as file:
            writer = csv.DictWriter(file, list(whole), lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerow(whole)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
