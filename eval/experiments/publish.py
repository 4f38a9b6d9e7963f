"""From OUT to the pages: the files that are committed, and the places that are written from them.

    benchmarks/results/experiments{.csv,.md,_runs.jsonl}    every row, the same to read, every run
    aoquant/tools/measured.csv                              `aoquant recipes --for`, and the table of docs/choosing.md
    docs/figures/bits.svg                                   perplexity against bits a weight
    README.md, between its two marks                        the headline rows beside torchao's, and the figure

Nothing is typed by hand, so that a page has the numbers of the runs; a later table replaces an earlier one.
"""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pages

from aoquant.tools import choosing
from aoquant.tools.markdown import table, wrapped

ROOT = Path(__file__).resolve().parents[2]
UNBROKEN = "\0"  # a space at which no line is wrapped: a part of a message may mean something to Markdown
PREPARED = "†"  # marks what was scored as prepared
HEADS = ("recipe", "bits", "float", "PTQ", "QAT", "recovered, %", "seeds", "torchao's QAT", "recovered, %", "seeds")


def publish(out: Path, root: Path = ROOT) -> None:
    """Write all of it from a table in `out`.

    Raises:
        ValueError: there is no table, or the README has no place for it.
    """
    if not (out / "results.csv").is_file():
        raise ValueError(f"--out must hold results.csv, got {str(out)!r}: run with --table first")
    with (out / "results.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    if not headlines(rows):
        raise ValueError(f"{out / 'results.csv'} has no headline row that was trained: nothing to publish")
    results = root / "benchmarks" / "results"
    for source, target in (
        ("results.csv", results / "experiments.csv"),
        ("results.md", results / "experiments.md"),
        ("runs.jsonl", results / "experiments_runs.jsonl"),
        ("measured.csv", root / "aoquant" / "tools" / "measured.csv"),
    ):
        shutil.copyfile(out / source, target)
    source = choosing.source(root / "aoquant" / "tools" / "measured.csv")
    pages.between(root / "README.md", "experiments", f"{readme(rows)}\n\n{note(rows, source)}")
    page = root / "docs" / "choosing.md"
    lines = page.read_text(encoding="utf-8").split("\n")
    first = lines.index(next(line for line in lines if line.startswith(f"| {choosing.HEADS[0]} |")))
    last = lines.index("", first)
    lines[first:last] = choosing.markdown(choosing.measured(root / "aoquant" / "tools" / "measured.csv")).split("\n")
    page.write_text("\n".join(lines), encoding="utf-8")
    subprocess.run([sys.executable, str(root / "docs" / "figures" / "draw.py")], check=True)


def headlines(rows: Sequence[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """aoquant's headline rows, each under the loss that validation pages chose."""
    return [r for r in rows if r["headline"] == r["published"] == "True" and r["kind"] == "aoquant"]


def readme(rows: Sequence[Mapping[str, str]]) -> str:
    """Headline rows, and the torchao row that each is compared with."""
    lines = []
    for row in headlines(rows):
        other = beside(rows, row)
        bits, numbers = f"{float(row['bits']):.2f}", [f"{float(row[name]):.2f}" for name in ("float", "PTQ")]
        lines.append((f"`{row['recipe']}`", bits, *numbers, *recovery(row), *recovery(other)))
    return table(HEADS, lines)


def beside(rows: Sequence[Mapping[str, str]], row: Mapping[str, str]) -> Mapping[str, str]:
    """The torchao row that a row is compared with; empty where there is none."""
    return next(
        (r for r in rows if r["row"] == row["against"] and r["kind"] == "torchao" and r["published"] == "True"), {}
    )


def recovery(row: Mapping[str, str]) -> tuple[str, str, str]:
    """Perplexity and recovered share of a row, mean and spread over seeds, marked where they are not the converted
    model's; and the number of seeds.
    """
    if not row.get("QAT"):
        return "", "", ""

    def cell(name: str, form: str) -> str:
        if not row[name]:
            return ""
        error, mark = row[f"{name} sd"], f" {PREPARED}" if row["as prepared"] else ""
        return f"{float(row[name]):{form}}" + (f" ± {float(error):{form}}" if error else "") + mark

    return cell("QAT", ".2f"), cell("recovered %", ".1f"), row["seeds"]


def note(rows: Sequence[Mapping[str, str]], source: str) -> str:
    """What stands below the README's table, wrapped as its other text is."""
    floats = [row for row in rows if row["row"] == "bf16" and row["QAT"]]
    end = " (its rate is an end of the search)" if floats and floats[0]["rate at an end"] == "True" else ""
    tuned = f"Float, fine-tuned on the same tokens: {float(floats[0]['QAT']):.2f}{end}. " if floats else ""
    reasons = {reason for row in headlines(rows) if (reason := beside(rows, row).get("as prepared"))}
    marked = (
        f"{PREPARED} PTQ and QAT are scores of torchao's prepared model: converted layers did not run there "
        f'("{"; ".join(sorted(reasons)).replace(" ", UNBROKEN)}"). '
        if reasons
        else ""
    )
    words = (
        f"{source} Scored as converted, but where marked; ±: deviation over seeds. Recovered: (PTQ - QAT) / (PTQ - float) "
        f"in log perplexity. {tuned}torchao: the same budget, by its own `QATConfig`. {marked}Prepared equals converted in every run of aoquant's. "
        "[All rows](benchmarks/results/experiments.md), [how they are made](docs/experiments.md)."
    )
    picture = "![Word perplexity against bits a weight: PTQ, QAT, and torchao's QAT](docs/figures/bits.svg)"
    return wrapped(words).replace(UNBROKEN, " ") + f"\n\n{picture}"
