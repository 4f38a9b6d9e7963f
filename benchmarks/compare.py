"""Is the new code as fast as the old? Both checkouts measured in turns on one device, in one run.

    python benchmarks/compare.py OLD_CHECKOUT [SUITE ...] [--only WORD ...] [--slack 0.02] [--limit SECONDS]

Two processes live at the same time, one with this checkout and one with the old one, each with its own aoquant and its
own benchmarks/*.py. Both prepare a chunk of measurements at once (kernels and graphs compile then), and measure it in
turns, one process at work while the other waits: new, old, old, new, ... A row is the best turn of each (a turn's
number is a median), and their ratio; above 1 + slack it is flagged, and a flagged row makes the exit code 1.

layer, decode and encode are benchmarks/run.py's, without torchao's layers. host and graph are benchmarks/host.py's:
what Python needs to issue a call, also as a ratio to nn.Linear's in the same process, and a step eager, compiled and in
a CUDA graph. generate is benchmarks/model.py's for a small Llama, experts is benchmarks/moe.py's for a layer. These
four also run without a GPU (--quick: tiny layers and models).
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
SUITES = ("layer", "decode", "encode", "host", "graph", "generate", "experts")
NEED_GPU = {"layer", "decode", "encode"}
NUMBERS = {
    "ms_p50",
    "us_p50",
    "host_us",
    "to_linear",
    "cpu_ms",
    "one_thread_ms",
    "one_thread_cpu_ms",
}  # what is compared, in any unit
WORDS = ("suite", "shape", "group", "rows", "variant", "how")  # what tells one row from another
Row = dict[str, Any]


class Worker:
    """A checkout's process."""

    def __init__(self, name: str, checkout: Path, log: Path) -> None:
        self.name = name
        given = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
        path = os.pathsep.join([str(checkout), str(checkout / "benchmarks"), *given])
        self.log = log.open("w")
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(HERE.with_name("compare_worker.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            cwd=checkout,
            env=os.environ | {"PYTHONPATH": path},
        )

    def tell(self, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def hear(self) -> Any:
        """Raises RuntimeError with what went wrong there."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the {self.name} process ended; its last words are in {self.log.name}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{self.name}: {answer['error']}")
        return answer["answer"]

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)
        self.log.close()


def by_name(rows: list[Row]) -> dict[tuple[str, ...], float]:
    """Row's words and the number's name -> the number."""
    return {
        (*(str(row.get(word, "")) for word in WORDS), number): float(row[number])
        for row in rows
        for number in NUMBERS
        if row.get(number) not in (None, "")
    }


def both(new: Worker, old: Worker, turns: int, slack: float) -> list[Row]:
    """Measure what is prepared; where a row is flagged, as often again: what disturbs a turn only makes it slower."""
    found: dict[str, list[dict[tuple[str, ...], float]]] = {"new": [], "old": []}
    rows: list[Row] = []
    for turn in range(2 * turns):
        if turn == turns and not any(row["flag"] == "SLOWER" for row in rows):
            break
        for worker in (new, old) if turn % 2 == 0 else (old, new):
            worker.tell(measure=True)
            found[worker.name].append(by_name(worker.hear()))
        rows = ratios(found["new"], found["old"], slack)
    return rows


def ratios(new: list[dict[tuple[str, ...], float]], old: list[dict[tuple[str, ...], float]], slack: float) -> list[Row]:
    """A row for every number, of the best turn of either side."""
    rows = []
    for name in sorted(new[0].keys() | old[0].keys()):
        row = dict(zip((*WORDS, "number"), name, strict=True))
        now, was = ([turn[name] for turn in side if name in turn] for side in (new, old))
        if not (now and was):
            rows.append(row | {"old": "", "new": "", "ratio": "", "flag": f"only in {'new' if now else 'old'}"})
            continue
        ratio = min(now) / min(was)
        rows.append(
            row | {"old": min(was), "new": min(now), "ratio": ratio, "flag": "SLOWER" if ratio > 1 + slack else ""}
        )
    return rows


def main() -> int:
    """Print and write the rows; 1 when one is slower or could not be measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="a checkout of the old code, its csrc built as this one's")
    parser.add_argument("suites", nargs="*", choices=[[], *SUITES], help="default: all on a GPU, host without")
    parser.add_argument("--turns", type=int, default=2, help="twice as many where a row is flagged")
    parser.add_argument("--slack", type=float, default=0.02)
    parser.add_argument("--limit", type=float, default=0, metavar="SECONDS", help="after this, no chunk is begun")
    parser.add_argument("--only", nargs="*", default=(), help="chunks with one of these words, such as nvfp4")
    parser.add_argument(
        "--quick", action="store_true", help="tiny layers and models, of the suites that run without a GPU"
    )
    parser.add_argument("--out", type=Path, default=HERE.parent / "results" / "compare.csv")
    args = parser.parse_args()
    if not (args.old / "aoquant" / "__init__.py").is_file():
        parser.error(f"{args.old} is no checkout: it has no aoquant/__init__.py")
    import torch
    from record_golden import versions

    gpu = torch.cuda.is_available()
    suites = args.suites or (list(SUITES) if gpu else ["host"])
    if not gpu and (wanting := [s for s in suites if s in NEED_GPU]):
        parser.error(f"{', '.join(wanting)}: needs a CUDA device")
    start, meta, wrong = time.monotonic(), versions(torch.device("cuda" if gpu else "cpu")), 0
    args.out.parent.mkdir(parents=True, exist_ok=True)
    logs = args.out.parent
    new = Worker("new", HERE.parents[1], logs / "compare_new.log")
    old = Worker("old", args.old.resolve(), logs / "compare_old.log")
    with args.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*meta, *WORDS, "number", "old", "new", "ratio", "flag"], lineterminator="\n")
        writer.writeheader()
        for worker, checkout in ((new, HERE.parents[1]), (old, args.old.resolve())):
            worker.tell(where=True)
            if (found := worker.hear()) != str(checkout):
                raise SystemExit(f"the {worker.name} process imported aoquant from {found}, not from {checkout}")
        new.tell(chunks=suites)
        for chunk in new.hear():
            if args.only and not any(word in part for word in args.only for part in chunk):
                continue
            if args.limit and time.monotonic() - start > args.limit:
                print(f"not measured, out of time: {' '.join(chunk)}", flush=True)
                wrong += 1
                continue
            began = time.monotonic()
            for worker in (new, old):  # both compile at once
                worker.tell(prepare=chunk, quick=args.quick)
            try:
                errors = [str(e) for worker in (new, old) if (e := _error(worker.hear)) is not None]
                if errors:
                    raise RuntimeError("; ".join(errors))
                rows = both(new, old, args.turns, args.slack)
            except RuntimeError as error:
                print(f"not measured: {' '.join(chunk)}: {error}", flush=True)
                wrong += 1
                continue
            for row in rows:
                writer.writerow({k: f"{v:.5g}" if isinstance(v, float) else v for k, v in (meta | row).items()})
                numbers = "  ".join(f"{row[k]:.4g}" for k in ("old", "new", "ratio") if row[k] != "")
                words = " ".join(v for v in (*(row[w] for w in WORDS), row["number"]) if v)
                print(f"  {words}: {numbers} {row['flag']}", flush=True)
            file.flush()
            wrong += sum(row["flag"] == "SLOWER" for row in rows)
            print(f"{' '.join(chunk)}: {time.monotonic() - began:.0f} s", flush=True)
    for worker in (new, old):
        worker.stop()
    print(f"{wrong} rows slower by more than {args.slack:.0%}, or not measured")
    return int(wrong > 0)


def _error(hear: Callable[[], Any]) -> RuntimeError | None:
    try:
        hear()
    except RuntimeError as error:
        return error
    return None


if __name__ == "__main__":
    sys.exit(main())
