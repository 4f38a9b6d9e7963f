"""Mutation testing: how many plausible mistakes in the source do the tests notice?

    python -m tools.mutation --map                     # once, and after larger changes: which tests run which function
    python -m tools.mutation --map test/ops/test_ops.py  # measure the tests of some files anew, after new tests
    python -m tools.mutation --workers 16 --minutes 8  # or `make mutate`; run it again and it goes on where it stopped
    python -m tools.mutation --again                   # the survivors too, after new tests
    python -m tools.mutation --shard 1/4               # every fourth mutant, for one of four machines
                                                       # afterwards once without --shard, for all

A sample of `--number` mutants is drawn from the files that the CPU tests run. A mutant's place in the sample depends on
`--seed` and on its own line alone, so a change elsewhere leaves the sample as it was. Left alone, since they run on a
GPU only: files of which no test runs a function, and functions below ops/ that no test runs.

The tests of a mutant come from the map (ran.py), up to `--budget` seconds. A mutant is killed by a test that fails
twice with it and then passes without it (pool.py). A mutant that runs five times as long as its tests do without it,
and 30 seconds more, counts as killed too. If failures do not come again and no other test fails, the mutant is
"unsteady" and counts as survived.

`tests` in the results: the test that killed the mutant, or how many it survived.

Results: mutation.csv (a row for each mutant), mutation_score.csv and mutation_survivors.csv, in benchmarks/results or
`--out`.

Why a tool of our own: a mutant costs its tests and no import of torch, as in mutmut, which however mutates functions
alone and takes no sample; cosmic-ray has one test command for all mutants, and starts a process for each.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from .equivalent import EQUIVALENT
from .operators import Mutant, compiles, mutants
from .pool import BROKEN, KILLED, SURVIVED, TIMEOUT, UNSTEADY, Job, Pool, prepare
from .ran import MAP, ROOT, Measured, choose, measure, read

COLUMNS = ("id", "file", "line", "operator", "before", "after", "outcome", "seconds", "tests")
EQUIVALENT_OUTCOME = "equivalent"
GRACE, TIMES = 30.0, 5.0  # a mutant's time: seconds, and multiples of what its tests take without it


def main() -> None:
    options = _options()
    if options.map is not None:
        return measure(options.workers, options.ran, options.map)
    tests = read(options.ran)
    sample = draw(tests, options.number, options.seed, options.only)
    part, parts = (int(n) for n in options.shard.split("/"))
    sample = sample[part - 1 :: parts]
    results = options.out / f"mutation{'' if parts == 1 else f'_{part}of{parts}'}.csv"
    known = [
        results,
        *([] if parts > 1 else options.out.glob("mutation_[0-9]*of*[0-9].csv")),
    ]  # all of them together, after the shards
    rows = [row for path in known for row in _read(path)]
    wanted = {identity(m) for m in sample}  # a row of an older source says nothing any more
    rows = list({row["id"]: row for row in rows if row["id"] in wanted and _stands(row, options)}.values())
    left = _settle(rows, [m for m in sample if identity(m) not in {row["id"] for row in rows}])
    print(f"{len(sample)} mutants, {len(rows)} known, {len(left)} to run, {options.workers} workers", flush=True)
    if left:
        deadline = time.monotonic() + 60 * options.minutes
        prepare()
        with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
            pool: Pool[Any] = Pool(Path(folder), options.workers)
            for row in _run(pool, left, tests, options.budget, deadline):
                rows.append(row)
                _write(results, rows)
                if row["outcome"] in (SURVIVED, UNSTEADY):
                    print(
                        f"{row['outcome']} {row['file']}:{row['line']}\n    - {row['before']}\n    + {row['after']}",
                        flush=True,
                    )
    _write(results, rows)
    summarize(rows, options.out, results.stem)
    if len(rows) < len(sample):
        print(f"{len(sample) - len(rows)} mutants left: run it again")


def draw(tests: Iterable[Measured], number: int, seed: int, only: Sequence[str] = ("",)) -> list[Mutant]:
    """Return the sample, in an order that has nothing to do with files."""
    package, ran = ROOT / "aoquant", frozenset[str]().union(*(t.functions for t in tests))
    files = {f.partition(":")[0] for f in ran if not f.endswith(":")}
    sources = {f: path.read_bytes() for f in files if f.startswith(tuple(only)) and (path := package / f).exists()}
    every = (m for f, source in sources.items() for m in mutants(f, source))
    here = (m for m in every if not m.file.startswith("ops/") or not m.function or f"{m.file}:{m.function}" in ran)
    found = sorted(here, key=lambda m: identity(m, seed))
    unique = {
        identity(m): m for m in reversed(found)
    }  # two that read alike, such as x + x with one sign turned, count once
    whole = (m for m in reversed(unique.values()) if compiles(m.apply(sources[m.file])))
    return list(islice(whole, number))


def identity(mutant: Mutant, seed: int = 0) -> str:
    """A name that depends on the mutant's own line, not on its number."""
    text = "|".join((str(seed), mutant.file, mutant.operator, mutant.before, mutant.after))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _stands(row: dict[str, str], options: argparse.Namespace) -> bool:
    return row["outcome"] != UNSTEADY and not (options.again and row["outcome"] == SURVIVED)


def _settle(rows: list[dict[str, str]], left: list[Mutant]) -> list[Mutant]:
    """Enter the known equivalent mutants into `rows`; returns the others. Entries whose line is gone are named."""
    known = {(e.file, e.before, e.after) for e in EQUIVALENT}
    for e in EQUIVALENT:
        text = " ".join((ROOT / "aoquant" / e.file).read_text().split()) if (ROOT / "aoquant" / e.file).exists() else ""
        if e.before not in text:
            print(f"tools/mutation/equivalent.py: no such line in {e.file} any more: {e.before}")
    rows[:] = [
        row for row in rows if row["outcome"] != SURVIVED or (row["file"], row["before"], row["after"]) not in known
    ]
    have = {row["id"] for row in rows}
    rows += [
        _row(m, EQUIVALENT_OUTCOME, 0, "")
        for m in left
        if (m.file, m.before, m.after) in known and identity(m) not in have
    ]
    return [m for m in left if (m.file, m.before, m.after) not in known]


def _run(
    pool: Pool[Any], left: list[Mutant], tests: list[Measured], budget: float, deadline: float
) -> Iterator[dict[str, str]]:
    def jobs() -> Iterator[Job[tuple[Mutant, tuple[str, ...]]]]:
        for m in left:
            if time.monotonic() < deadline:
                chosen = choose(tests, m.file, m.function, budget)
                names, limit = tuple(t.name for t in chosen), GRACE + TIMES * sum(t.seconds for t in chosen)
                yield Job((m, names), names, limit, m.file, m.apply((ROOT / "aoquant" / m.file).read_bytes()))

    for done in pool.run(jobs()):
        mutant, names = done.of
        # broken twice, and not without the mutant: it broke what pytest needs to start
        outcome = KILLED if done.outcome == BROKEN else done.outcome
        if done.outcome == UNSTEADY:
            print(f"failed once, or without the mutant too: {' '.join(done.failed)}", flush=True)
        killer = done.failed[0] if outcome == KILLED and done.failed else f"{len(names)} tests"
        yield _row(mutant, outcome, done.seconds, killer)


def _row(m: Mutant, outcome: str, seconds: float, tests: str) -> dict[str, str]:
    values = (identity(m), m.file, m.line, m.operator, m.before, m.after, outcome, f"{seconds:.1f}", tests)
    return dict(zip(COLUMNS, map(str, values), strict=True))


def summarize(rows: list[dict[str, str]], folder: Path, stem: str) -> None:
    """Score by folder, and survivors. The score leaves out the equivalent mutants."""
    groups = sorted({row["file"].partition("/")[0] for row in rows})
    table = []
    for name in [*groups, "all"]:
        counts = Counter(row["outcome"] for row in rows if name in (row["file"].partition("/")[0], "all"))
        killed = counts[KILLED] + counts[TIMEOUT]
        survived = counts[SURVIVED] + counts[UNSTEADY]
        total = killed + survived
        score = f"{100 * killed / total:.1f}" if total else ""
        values = (
            name,
            sum(counts.values()),
            killed,
            counts[TIMEOUT],
            survived,
            counts[EQUIVALENT_OUTCOME],
            score,
        )
        table.append([str(v) for v in values])
    head = (
        "folder",
        "mutants",
        "killed",
        "of these by timeout",
        "survived",
        "equivalent",
        "killed, % of the non-equivalent",
    )
    with open(folder / f"{stem}_score.csv", "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([head, *table])
    _write(folder / f"{stem}_survivors.csv", [row for row in rows if row["outcome"] in (SURVIVED, UNSTEADY)])
    for line in (head, *table):
        print("  ".join(cell.ljust(12) for cell in line))


def _read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def _write(path: Path, rows: list[dict[str, str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(rows, key=lambda row: (row["file"], int(row["line"]), row["id"])))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.mutation", description="Mutation testing; see tools/mutation/__main__.py."
    )
    parser.add_argument("--map", nargs="*", help="measure which functions tests run, all or those of files, and stop")
    parser.add_argument("--ran", type=Path, default=MAP, help="the map's file")
    parser.add_argument(
        "--budget", type=float, default=120, help="seconds of tests for a mutant, as they were measured"
    )
    parser.add_argument("--number", type=int, default=400, help="mutants in the sample")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[""], help="paths below aoquant/ that files start with")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--shard", default="1/1", help="i/n: every n-th mutant from the i-th on")
    parser.add_argument("--minutes", type=float, default=600, help="start no mutant after this time")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--again", action="store_true", help="run the survivors again, after new tests")
    return parser.parse_args()


if __name__ == "__main__":
    main()
