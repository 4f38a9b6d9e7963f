"""From OUT to the pages: the files that are committed, and the places that are written from them.

    benchmarks/results/experiments{.csv,.md,_runs.jsonl}    every row, the same to read, every run
    aoquant/tools/measured.csv                              `aoquant recipes --for`, and the table of docs/choosing.md
    docs/figures/bits.svg                                   perplexity against bits a weight
    README.md, between its two marks                        the headline rows beside torchao's, and the figure

and of a table of a second model (`--publish second`), whose numbers are not compared with the first one's:

    benchmarks/results/experiments_second{.csv,.md,_runs.jsonl}           the same
    benchmarks/results/pretrain_llama_second.json, ..._second_loss.csv    what pretrain.py logged beside --model
    docs/experiments.md, between two marks                                all rows beside torchao's

Nothing is typed by hand, so that a page has the numbers of the runs; a later table replaces an earlier one.
"""

from __future__ import annotations

import csv
import json
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
HOW_TO_READ = (
    "Scored as converted, but where marked; ±: deviation over seeds. "
    "Recovered: (PTQ - QAT) / (PTQ - float) in log perplexity."
)
DIFFERENCE = "log perplexity less the other's"
HEADS = ("recipe", "bits", "float", "PTQ", "QAT", "recovered, %", "seeds", "torchao's QAT", "recovered, %", "seeds")


def publish(out: Path, root: Path = ROOT) -> None:
    """Write all of it from a table in `out`.

    Raises:
        ValueError: there is no table, or the README has no place for it.
    """
    rows = read(out)
    if not headlines(rows):
        raise ValueError(f"{out / 'results.csv'} has no headline row that was trained: nothing to publish")
    copy_results(out, root, "experiments")
    shutil.copyfile(out / "measured.csv", root / "aoquant" / "tools" / "measured.csv")
    source = choosing.source(root / "aoquant" / "tools" / "measured.csv")
    pages.between(root / "README.md", "experiments", f"{readme(rows)}\n\n{note(rows, source)}")
    page = root / "docs" / "choosing.md"
    lines = page.read_text(encoding="utf-8").split("\n")
    first = lines.index(next(line for line in lines if line.startswith(f"| {choosing.HEADS[0]} |")))
    last = lines.index("", first)
    lines[first:last] = choosing.markdown(choosing.measured(root / "aoquant" / "tools" / "measured.csv")).split("\n")
    page.write_text("\n".join(lines), encoding="utf-8")
    subprocess.run([sys.executable, str(root / "docs" / "figures" / "draw.py")], check=True)


def publish_second(out: Path, model: Path | None, root: Path = ROOT) -> None:
    """Write what there is of a second model from a table in `out`. model: as pretrain.py wrote it.

    Raises:
        ValueError: there is no table, or no log of the model.
    """
    rows = read(out)
    if not trained(rows):
        raise ValueError(f"{out / 'results.csv'} has no row that was trained: nothing to publish")
    if model is None or not (model.parent / "train_log.json").is_file():
        raise ValueError(
            f"--model must be the folder model of a run of eval/pretrain.py with train_log.json beside it, got {str(model)!r}"
        )
    results = root / "benchmarks" / "results"
    log = json.loads((model.parent / "train_log.json").read_text(encoding="utf-8"))
    del log["losses"]  # the curve's
    (results / "pretrain_llama_second.json").write_text(json.dumps(log, indent=1) + "\n", encoding="utf-8")
    shutil.copyfile(model.parent / "loss.csv", results / "pretrain_llama_second_loss.csv")
    copy_results(out, root, "experiments_second")
    content = f"{second(rows)}\n\n{note_of_second(rows, choosing.source(out / 'measured.csv'))}"
    pages.between(root / "docs" / "experiments.md", "second model", content)


def read(out: Path) -> list[dict[str, str]]:
    """The rows of a table. Raises ValueError where there is none."""
    if not (out / "results.csv").is_file():
        raise ValueError(f"--out must hold results.csv, got {str(out)!r}: run with --table first")
    with (out / "results.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def copy_results(out: Path, root: Path, name: str) -> None:
    """The table and its runs, where they are committed."""
    for source, target in (("results.csv", ".csv"), ("results.md", ".md"), ("runs.jsonl", "_runs.jsonl")):
        shutil.copyfile(out / source, root / "benchmarks" / "results" / f"{name}{target}")


def trained(rows: Sequence[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """aoquant's rows that were trained, each under the loss that validation pages chose."""
    return [r for r in rows if r["published"] == "True" and r["kind"] == "aoquant"]


def headlines(rows: Sequence[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """The headline rows of these."""
    return [r for r in trained(rows) if r["headline"] == "True"]


def readme(rows: Sequence[Mapping[str, str]]) -> str:
    """Headline rows, and the torchao row that each is compared with."""
    return table(HEADS, [(f"`{row['recipe']}`", *numbers(rows, row)) for row in headlines(rows)])


def second(rows: Sequence[Mapping[str, str]]) -> str:
    """All rows, with the difference from the torchao row that each is compared with."""
    return table(
        (*HEADS, DIFFERENCE),
        [
            (f"`{row['row']}`", *numbers(rows, row), row[DIFFERENCE].partition(": ")[2] if beside(rows, row) else "")
            for row in trained(rows)
        ],
    )


def numbers(rows: Sequence[Mapping[str, str]], row: Mapping[str, str]) -> tuple[str, ...]:
    """The cells of a row after its name."""
    scores = [f"{float(row[name]):.2f}" for name in ("bits", "float", "PTQ")]
    return (*scores, *recovery(row), *recovery(beside(rows, row)))


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
    words = (
        f"{source} {HOW_TO_READ} {tuned(rows)}torchao: the same budget, by its own `QATConfig`. "
        f"{as_prepared(rows, headlines(rows))}Prepared equals converted in every run of aoquant's. "
        "[All rows](benchmarks/results/experiments.md), [how they are made](docs/experiments.md)."
    )
    picture = "![Word perplexity against bits a weight: PTQ, QAT, and torchao's QAT](docs/figures/bits.svg)"
    return wrapped(words).replace(UNBROKEN, " ") + f"\n\n{picture}"


def note_of_second(rows: Sequence[Mapping[str, str]], source: str) -> str:
    """What stands below the second model's table."""
    words = (
        f"{source} {HOW_TO_READ} {tuned(rows)}{as_prepared(rows, trained(rows))}The last column is ours less torchao's, with "
        "its 95 % interval over paired seeds: below zero, ours is better. "
        "[All rows and checks](../benchmarks/results/experiments_second.md); "
        "the model's [settings](../benchmarks/results/pretrain_llama_second.json) and "
        "[loss](../benchmarks/results/pretrain_llama_second_loss.csv)."
    )
    return wrapped(words).replace(UNBROKEN, " ")


def tuned(rows: Sequence[Mapping[str, str]]) -> str:
    """A sentence on the fine-tuned float model, where it was run."""
    floats = [row for row in rows if row["row"] == "bf16" and row["QAT"]]
    end = " (its rate is an end of the search)" if floats and floats[0]["rate at an end"] == "True" else ""
    return f"Float, fine-tuned on the same tokens: {float(floats[0]['QAT']):.2f}{end}. " if floats else ""


def as_prepared(rows: Sequence[Mapping[str, str]], shown: Sequence[Mapping[str, str]]) -> str:
    """A sentence on the mark, where the table has it."""
    reasons = {reason for row in shown if (reason := beside(rows, row).get("as prepared"))}
    if not reasons:
        return ""
    return (
        f"{PREPARED} PTQ and QAT are scores of torchao's prepared model: converted layers did not run there "
        f'("{"; ".join(sorted(reasons)).replace(" ", UNBROKEN)}"). '
    )
