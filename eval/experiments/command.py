"""Every recipe of configs/ fine-tuned on one budget, scored by lm-eval's wikitext, beside torchao: one table.

    python eval/experiments --model DIR --wikitext DIR --text mix.txt.xz --out OUT --jobs 8 --limit 500
    python eval/experiments --model DIR --wikitext DIR --text mix.txt.xz --out OUT --tokenise  # the text alone, no GPU
    python eval/experiments --model DIR --wikitext DIR --text mix.txt.xz --out OUT --dry-run   # what would be trained
    python eval/experiments --model DIR --wikitext DIR --out OUT --cost     # the cost columns, one row at a time
    python eval/experiments --out OUT --table    # the files again, nothing is run

--model: a Hugging Face folder with its tokenizer. --wikitext: WikiText-2 as test.jsonl and validation.jsonl. Learning
rates are chosen on validation pages; test pages are scored for every run of the whole budget and chosen from in none.

A process takes one row under one loss; `--jobs` of them run at once, spread over the GPUs that are visible. Headline
rows with the first loss come first, then the other rows, then the second loss. Rows of the float model have a loss of
their own, whatever `--losses` says. A result is appended to OUT/runs.jsonl the moment it is known. `--limit` seconds
after the start processes save what they are training and stop; the same command goes on from there, and skips what is
done. A call that leaves runs says how many, and its exit status is 3. Carried to another machine without OUT/state,
only the runs that were being trained begin again. A second call in the same OUT is refused while one runs, or a process
of one that was killed; SIGTERM ends a call with its processes.
"""

from __future__ import annotations

import argparse
import fcntl
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import torch
from checkout import commit

from aoquant.integrations.finetune import LOSSES
from experiments import cost, known, table, worker
from experiments.processes import Processes
from experiments.publish import DESTINATIONS, MAIN, publish
from experiments.records import Run
from experiments.rows import Row, at_rates_of, load_all
from experiments.setting import OPTIONS, Setting, records_of, settings_of

GRACE = 60.0  # seconds after the limit until a process that has not stopped is ended


def whole(least: int) -> Callable[[str], int]:
    """For an option: a number of this much or more."""

    def read(given: str) -> int:
        if not given.isdecimal() or int(given) < least:
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, got {given}")
        return int(given)

    return read


def positive(most: float = math.inf) -> Callable[[str], float]:
    """For an option: a number above 0, at most this."""

    def read(given: str) -> float:
        with suppress(ValueError):
            if 0 < float(given) <= most:
                return float(given)
        raise argparse.ArgumentTypeError(
            f"must be a number above 0{f', at most {most:g}' * (most < math.inf)}, got {given}"
        )

    return read


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    otherwise = "without --text as the runs in OUT, else %s"
    parser.add_argument("--model", type=Path)
    parser.add_argument("--moe-model", type=Path)
    parser.add_argument("--wikitext", type=Path)
    parser.add_argument("--text", type=Path, nargs="*", default=[], help="needed until OUT holds the tokens")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", nargs="+", help="these alone, in this order; all that have a model by default")
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=LOSSES, help="these alone")
    parser.add_argument("--tokens", type=whole(1), help=f"of a run; {otherwise % f'{known.TOKENS:,}'}")
    parser.add_argument("--batch", type=whole(1), help=f"blocks a step; {otherwise % known.BATCH}")
    parser.add_argument("--block", type=whole(1), help=f"tokens a block; {otherwise % known.BLOCK}")
    parser.add_argument("--documents", type=whole(1), help="score the first test pages only")
    parser.add_argument("--score-batch", type=whole(1), default=32, help="windows scored at once")
    parser.add_argument(
        "--search",
        type=positive(1.0),
        help=f"share of the tokens that tries a learning rate; {otherwise % known.SEARCH}",
    )
    parser.add_argument("--rates", type=Path, help="a results.csv: its learning rates and losses, without a search")
    parser.add_argument("--seeds", type=whole(1), help="of a row at most")
    parser.add_argument("--jobs", type=whole(0), default=1, help="processes at once, over all GPUs; 0: in this one")
    parser.add_argument("--limit", type=positive(), help="seconds after which processes save and stop")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--configs", type=Path, help="another folder of rows")
    parser.add_argument("--cost", action="store_true", help="measure the cost columns and nothing else")
    parser.add_argument("--table", action="store_true", help="write the table and nothing else; needs OUT alone")
    publishing = {"nargs": "?", "const": MAIN, "choices": tuple(DESTINATIONS)}
    parser.add_argument("--publish", **publishing, help="write the table and the pages from it, as this model's")
    parser.add_argument("--tokenise", action="store_true", help="write the token ids and nothing else")
    parser.add_argument("--dry-run", action="store_true", help="print what would be trained, and nothing else")
    parser.add_argument("--eager", action="store_true", help="no torch.compile, no CUDA graphs")
    parser.add_argument("--no-graph", action="store_true", help="no CUDA graphs")
    parser.add_argument("--commit", help="of the code, kept with every result; git's by default")
    parser.add_argument("--worker", nargs=2, metavar=("ROW", "LOSS"), help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=math.inf, help=argparse.SUPPRESS)
    o = parser.parse_args(arguments)
    o.commit = commit() if o.commit is None else o.commit
    return o


@contextmanager
def alone(out: Path) -> Iterator[TextIO]:
    """A lock on OUT, which processes that inherit the file hold too. Raises ValueError where another call has it."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"--out {out} is in use by another call, or by processes that one left") from None
        yield lock


def modelled(o: argparse.Namespace) -> dict[str, Row]:
    """All rows that have a model; every row for a table without one, which is of the runs in OUT."""
    rows = load_all(o.configs) if o.configs else load_all()
    if o.rates is not None:
        rows = at_rates_of(o.rates, rows)
    there = {"dense": o.model, "moe": o.moe_model}
    of_runs = (o.table or o.publish) and not any(there.values())
    return {name: row for name, row in rows.items() if of_runs or there[row.model] is not None}


def chosen(o: argparse.Namespace) -> dict[str, Row]:
    """The rows to run. Raises ValueError for a row that has no model, or is none, and where no row has one."""
    rows, every = modelled(o), load_all(o.configs) if o.configs else load_all()
    if unknown := set(o.rows or ()) - every.keys():
        raise ValueError(f"no row {', '.join(sorted(unknown))}; there are {', '.join(every)}")
    for name in o.rows or ():
        if name not in rows:
            raise ValueError(
                f"--rows {name} needs {OPTIONS[every[name].model]}: the folder of the model that it quantises"
            )
    if not rows:
        raise ValueError("no row has a model: give --model, and for the rows of experts --moe-model")
    return {n: replace(rows[n], seeds=min(rows[n].seeds, o.seeds or rows[n].seeds)) for n in o.rows or rows}


def tasks(o: argparse.Namespace, rows: dict[str, Row], settings: dict[str, Setting]) -> list[tuple[Row, str]]:
    """What is left to do, in order."""
    ordered = [(r, loss) for r in rows.values() for loss in r.losses if loss in o.losses or r.kind == "float"]
    ordered.sort(key=lambda task: (task[0].losses.index(task[1]), task[0].kind != "float", not task[0].headline))
    return [(row, loss) for row, loss in ordered if worker.missing(settings[row.model], row, loss)]


def run_all(o: argparse.Namespace, rows: dict[str, Row], until: float, lock: TextIO) -> list[str]:
    """Run what is left, `o.jobs` processes at once; the rows that failed."""
    settings = settings_of(o, rows.values())
    for setting in settings.values():  # here, before several processes ask
        setting.tokenise()
    waiting, processes, failed = tasks(o, rows, settings), Processes(o, lock), list[str]()
    (o.out / "logs").mkdir(parents=True, exist_ok=True)
    written = time.time()
    try:
        while processes.running or (waiting and time.time() < until):
            while waiting and len(processes.running) < max(1, o.jobs) and time.time() < until:
                row, loss = waiting.pop(0)
                if not o.jobs:
                    worker.work(o, row, loss, until)
                    continue
                processes.begin(row, loss, until)
            for name, status in processes.ended().items():
                if status not in (0, worker.UNFINISHED):
                    failed.append(name)
                    print(f"{name} failed; see {o.out / 'logs'}", file=sys.stderr, flush=True)
            if time.time() > until + GRACE:
                print(f"ended: {', '.join(processes.running)}", file=sys.stderr)
                break
            if time.time() > written + 30:
                show(o)
                written = time.time()
            time.sleep(0.2)
    finally:
        processes.kill()
    return failed


def planned(o: argparse.Namespace, rows: dict[str, Row]) -> str:
    """What a call would train, with its tokens; a search may go on for longer than is known."""
    from tabulate import tabulate

    settings, lines, total = settings_of(o, rows.values()), [], 0.0
    for row, loss in tasks(o, rows, settings):
        setting = settings[row.model]
        short, whole = worker.left(setting, row, loss)
        tokens = (
            (short * setting.search_steps + whole * setting.budget.steps)
            * setting.budget.batch
            * setting.budget.block
            / 1e6
        )
        lines.append((row.name, loss, short, whole, f"{tokens:.1f}"))
        total += tokens
    heads = ("row", "loss", "search, at least", "runs", "M tokens, at least")
    return f"{tabulate(lines, heads, tablefmt='github')}\n\n{total:.1f} M tokens at least"


def measure_all(o: argparse.Namespace, rows: dict[str, Row], until: float) -> list[str]:
    """The cost of every row that lacks it, one after the other, a process each but where --jobs is 0."""
    failed = []
    for row in without_cost(o, rows):
        if time.time() > until:
            break
        if not o.jobs:
            cost.measure(o, row)
        elif subprocess.run([sys.executable, *sys.argv, "--worker", row.name, "cost"], check=False).returncode:
            failed.append(f"{row.name}, cost")
    return failed


def without_cost(o: argparse.Namespace, rows: dict[str, Row]) -> list[Row]:
    """Rows whose cost is left to measure; a row with a trick costs what its recipe does, but for the trick."""
    settings = settings_of(o, rows.values())
    plain = [row for row in rows.values() if not row.trick]
    return [row for row in plain if cost.left(row, settings[row.model].records.read())]


def undone(o: argparse.Namespace, rows: dict[str, Row]) -> int:
    """Runs that a call has left, as far as searches are known; with --cost, rows without a cost."""
    if o.cost:
        return len(without_cost(o, rows))
    settings = settings_of(o, rows.values())
    return sum(max(1, sum(worker.left(settings[row.model], row, loss))) for row, loss in tasks(o, rows, settings))


def show(o: argparse.Namespace) -> tuple[str, list[str]]:
    """Write the table of what there is, whatever `--rows` says; returns it, and the rows that break the contract."""
    found: dict[Run, dict[str, Any]] = {}
    facts: dict[str, Any] = {}
    rows = modelled(o)
    for model, (records, parameters) in records_of(o, rows.values()).items():
        found |= records.read()
        facts |= records.made()
        facts |= {f"{model} model": records.settings}
        facts |= {f"{model} parameters": parameters} if parameters else {}
        facts |= {f"{model} tokens a run": math.prod(records.settings[name] for name in ("steps", "batch", "block"))}
    return table.write(o.out, rows, found, facts), table.broken(rows, found)


def main(o: argparse.Namespace, began: float | None = None) -> None:
    """began: the time that --limit counts from; now by default."""
    rows, until = chosen(o), (began or time.time()) + (o.limit or math.inf)
    if o.worker:
        row, what = rows[o.worker[0]], o.worker[1]
        if what == "cost":
            cost.measure(o, row)
            return
        sys.exit(worker.work(o, row, what, o.until))
    if o.dry_run:
        print(planned(o, rows))
        return
    failed, left = list[str](), 0
    if not (o.table or o.publish):
        with alone(o.out) as lock:
            if o.tokenise:
                for setting in settings_of(o, rows.values()).values():
                    setting.tokenise()
                return
            failed = measure_all(o, rows, until) if o.cost else run_all(o, rows, until, lock)
            left = undone(o, rows)
    text, broken = show(o)
    print(text)
    if o.publish:
        publish(o.out, o.publish, o.moe_model if o.publish == "moe" else o.model)
    if left:
        print(f"{left} runs left: the same command goes on", file=sys.stderr)
    if failed or broken:
        sys.exit(f"failed: {'; '.join([*failed, *broken])}")
    if left:
        sys.exit(worker.UNFINISHED)


def start(began: float) -> None:
    """What a user can mend is one line. SIGTERM is an exit, so that processes are ended."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        main(options(), began)
    except ValueError as error:
        sys.exit(f"experiments: {error}")
