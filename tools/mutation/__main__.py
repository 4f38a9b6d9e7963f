"""Mutation testing: how many plausible mistakes in the source do the tests near them notice?

    python -m tools.mutation --workers 16 --minutes 8  # or `make mutate`; run it again and it goes on where it stopped
    python -m tools.mutation --again                   # the survivors too, after new tests
    python -m tools.mutation --shard 1/4               # every fourth mutant, for one of four machines
                                                       # afterwards once without --shard, for all
    python -m tools.mutation --list                    # the tests, how long each takes, and what is drawn

A sample of `--number` mutants is drawn from the files of `near.py`. A mutant's place in the sample depends on `--seed`
and on its own line alone, so a change elsewhere leaves the sample as it was. The tests run twice without a mutant:
those that fail then are left out, one by one, and named. A mutant is killed by a test that fails twice with it and then
passes without it (pool.py); one that runs five times as long as the tests do without it, and 30 seconds more, counts as
killed too. A failure that does not come again is "unsteady" and counts as survived.

`tests` in the results: the test that killed the mutant, or all that it survived.

Results: mutation.csv (a row for each mutant), mutation_score.csv and mutation_survivors.csv, in benchmarks/results or
`--out`.

Why a tool of our own: a mutant costs its tests and no import of torch, as in mutmut, which however mutates functions
alone, takes no sample, and learns which tests belong to a function from a run of the whole suite; cosmic-ray has one
test command for all mutants, and starts a process for each.
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
from typing import Any, NamedTuple

from .equivalent import EQUIVALENT
from .near import tests_near
from .operators import Mutant, compiles, mutants
from .pool import BROKEN, KILLED, ROOT, SURVIVED, TIMEOUT, UNSTEADY, Job, Pool, prepare

COLUMNS = ("id", "file", "line", "operator", "before", "after", "outcome", "seconds", "tests")
EQUIVALENT_OUTCOME = "equivalent"
GRACE, TIMES = 30.0, 5.0  # a mutant's time: seconds, and multiples of what its tests take without it


class Healthy(NamedTuple):
    """A line of near.py that passes without a mutant: its seconds, and node ids that do not."""

    seconds: float
    without: tuple[str, ...]


def main() -> None:
    options = _options()
    sample = draw(options.number, options.seed, options.only)
    part, parts = (int(n) for n in options.shard.split("/"))
    sample = sample[part - 1 :: parts]
    results = options.out / f"mutation{'' if parts == 1 else f'_{part}of{parts}'}.csv"
    known = [
        results,
        *([] if parts > 1 else options.out.glob("mutation_[0-9]*of*[0-9].csv")),
    ]  # all of them together, after the shards
    rows = [] if options.list else [row for path in known for row in _read(path)]
    wanted = {identity(m) for m in sample}  # a row of an older source says nothing any more
    rows = list({row["id"]: row for row in rows if row["id"] in wanted and _stands(row, options)}.values())
    left = _settle(rows, [m for m in sample if identity(m) not in {row["id"] for row in rows}])
    print(f"{len(sample)} mutants, {len(rows)} known, {len(left)} to run, {options.workers} workers", flush=True)
    if left or options.list:
        deadline = time.monotonic() + 60 * options.minutes
        prepare()
        with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
            pool: Pool[Any] = Pool(Path(folder), options.workers)
            healthy = _baseline(pool, {t for m in left for t in tests_near(m.file)})
            if options.list:
                for mutant in left:
                    print(
                        f"{mutant.file}:{mutant.line}: {mutant.operator}\n    - {mutant.before}\n    + {mutant.after}"
                    )
                return
            for row in _run(pool, left, healthy, deadline):
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


def draw(number: int, seed: int, only: Sequence[str] = ("",)) -> list[Mutant]:
    """The sample, in an order that has nothing to do with files."""
    package = ROOT / "aoquant"
    files = sorted(p.relative_to(package).as_posix() for p in package.rglob("*.py"))
    sources = {f: (package / f).read_bytes() for f in files if tests_near(f) and f.startswith(tuple(only))}
    found = sorted((m for f, source in sources.items() for m in mutants(f, source)), key=lambda m: identity(m, seed))
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
        _row(m, EQUIVALENT_OUTCOME, 0, ())
        for m in left
        if (m.file, m.before, m.after) in known and identity(m) not in have
    ]
    return [m for m in left if (m.file, m.before, m.after) not in known]


def _baseline(pool: Pool[Any], names: Iterable[str]) -> dict[str, Healthy]:
    """The lines of near.py that pass without a mutant, in two runs; what fails in either is named and left out."""
    healthy, lost = dict[str, Healthy](), set[str]()
    names = sorted(names)
    for done in pool.run(Job(t, (t,), 300) for t in [*names, *names]):
        known = healthy.get(done.of, Healthy(0.0, ()))
        if done.outcome == KILLED and done.failed and all("::" in name for name in done.failed):
            print(f"left out, fails without a mutant: {', '.join(done.failed)}\n{done.log[-1500:]}", flush=True)
        elif done.outcome != SURVIVED:
            lost.add(done.of)
            print(f"left out, {done.outcome} without a mutant: {done.of}\n{done.log[-1500:]}", flush=True)
        without = tuple(sorted({*known.without, *done.failed}))
        healthy[done.of] = Healthy(max(known.seconds, done.seconds), without)
    for name, test in sorted(healthy.items()):
        print(f"{test.seconds:6.1f} s  {name}", flush=True)
    return {name: test for name, test in healthy.items() if name not in lost}


def _run(pool: Pool[Any], left: list[Mutant], healthy: dict[str, Healthy], deadline: float) -> Iterator[dict[str, str]]:
    def jobs() -> Iterator[Job[tuple[Mutant, tuple[str, ...]]]]:
        for m in left:
            tests = tuple(t for t in tests_near(m.file) if t in healthy)
            if not tests:
                print(f"no test left for {m.file}")
            elif time.monotonic() < deadline:
                limit = GRACE + TIMES * sum(healthy[t].seconds for t in tests)
                source = m.apply((ROOT / "aoquant" / m.file).read_bytes())
                without = tuple(name for t in tests for name in healthy[t].without)
                yield Job((m, tests), tests, limit, m.file, source, without)

    for done in pool.run(jobs()):
        mutant, tests = done.of
        # broken twice, and not without the mutant: it broke what pytest needs to start
        outcome = KILLED if done.outcome == BROKEN else done.outcome
        yield _row(mutant, outcome, done.seconds, done.failed[:1] if outcome == KILLED and done.failed else tests)


def _row(m: Mutant, outcome: str, seconds: float, tests: tuple[str, ...]) -> dict[str, str]:
    values = (identity(m), m.file, m.line, m.operator, m.before, m.after, outcome, f"{seconds:.1f}", " ".join(tests))
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
    parser.add_argument("--number", type=int, default=400, help="mutants in the sample")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[""], help="paths below aoquant/ that files start with")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--shard", default="1/1", help="i/n: every n-th mutant from the i-th on")
    parser.add_argument("--minutes", type=float, default=600, help="start no mutant after this time")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--again", action="store_true", help="run the survivors again, after new tests")
    parser.add_argument("--list", action="store_true", help="run the tests without mutants, print the sample, and stop")
    return parser.parse_args()


if __name__ == "__main__":
    main()
