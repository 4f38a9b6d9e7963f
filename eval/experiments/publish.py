"""From OUT to the pages: the files that are committed, and the places that are written from them.

    benchmarks/results/experiments{.csv,.md,_runs.jsonl}    every row, the same to read, every run
    aoquant/tools/measured.csv                              `aoquant recipes --for`, and the table of docs/choosing.md
    docs/figures/bits.svg                                   perplexity against bits a weight
    README.md, between two pairs of marks                   the headline rows beside torchao's; a note, and the figure
    docs/experiments.md, between pairs of marks             the seconds that runs took; how far checks were off

and of a table of another model (`--publish second`, `--publish moe`), whose numbers are not compared with these:

    benchmarks/results/experiments_second{.csv,.md,_runs.jsonl}           the same
    benchmarks/results/pretrain_llama_second.json, ..._second_loss.csv    what pretrain.py logged beside the model
    docs/experiments.md, between two marks                                all rows beside torchao's
    aoquant/tools/measured.csv, docs/choosing.md                          as above, for recipes that only it has
    docs/experiments.md, between pairs of marks                           seconds of runs, distances of checks
    docs/experiments.md, README.md's table                                what rows cost, of the second model
    docs/experiments.md, between two marks                                its rows by both losses

Nothing is typed by hand, so that a page has the numbers of the runs; a later table replaces an earlier one.
"""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pages

from aoquant.tools import choosing
from aoquant.tools.markdown import table, wrapped
from experiments import costs, losses
from experiments.checked import checked
from experiments.durations import durations
from experiments.measured import remember

ROOT = Path(__file__).resolve().parents[2]
UNBROKEN = "\0"  # a space at which no line is wrapped: a part of a message may mean something to Markdown
PREPARED = "†"  # marks what was scored as prepared
ENTROPY = "‡"  # marks what was trained by cross entropy, where other rows of the table were not
HOW_TO_READ = (
    "Scored as converted, but where marked; ±: deviation over seeds. "
    "Recovered: (PTQ - QAT) / (PTQ - float) in log perplexity."
)
HOW_TO_COMPARE = (
    "The last column is ours less torchao's, with its 95 % interval over paired seeds: below zero, ours is better. "
)
HOW_IT_COSTS = (
    "Costs are of a second model of this shape: tokens/s and training's memory over bf16's, and MB converted "
    "([all](docs/experiments.md#what-it-costs)). "
)
TORCHAO = "torchao's QAT"
DIFFERENCE = "log perplexity less the other's"
HEADS = ("recipe", "bits", "float", "PTQ", "QAT", "recovered, %", "seeds", TORCHAO, "recovered, %", "seeds")


@dataclass(frozen=True)
class Other:
    """A table of another model. name: in measured.csv; results, log: names in benchmarks/results; mark: in
    docs/experiments.md; option: of the model.
    """

    name: str
    results: str
    log: str
    mark: str
    option: str


OTHERS = {
    "second": Other("second", "experiments_second", "pretrain_llama_second", "second model", "--model"),
    "moe": Other("moe", "experiments_moe", "pretrain_moe", "experts", "--moe-model"),
}


def publish(out: Path, root: Path = ROOT) -> None:
    """Write all of it from a table in `out`.

    Raises:
        ValueError: there is no table, or the README has no place for it.
    """
    rows = read(out / "results.csv")
    if not headlines(rows):
        raise ValueError(f"{out / 'results.csv'} has no headline row that was trained: nothing to publish")
    copy_results(out, root, "experiments")
    write_choices(out, root, "first")
    write_readme(root)
    source, costed = choosing.source(out / "measured.csv"), bool(costs.published(root / "benchmarks" / "results"))
    pages.between(root / "README.md", "note on experiments", note(rows, source, costed))
    subprocess.run([sys.executable, str(root / "docs" / "figures" / "draw.py")], check=True)


def publish_other(out: Path, model: Path | None, other: Other, root: Path = ROOT) -> None:
    """Write what there is of another model from a table in `out`. model: as pretrain.py wrote it.

    Raises:
        ValueError: there is no table, or no log of the model.
    """
    rows = read(out / "results.csv")
    if not trained(rows):
        raise ValueError(f"{out / 'results.csv'} has no row that was trained: nothing to publish")
    if model is None or not (model.parent / "train_log.json").is_file():
        raise ValueError(
            f"{other.option} must be the folder model of a run of eval/pretrain.py with train_log.json beside it, "
            f"got {str(model)!r}"
        )
    results = root / "benchmarks" / "results"
    log = json.loads((model.parent / "train_log.json").read_text(encoding="utf-8"))
    del log["losses"]  # the curve's
    (results / f"{other.log}.json").write_text(json.dumps(log, indent=1) + "\n", encoding="utf-8")
    shutil.copyfile(model.parent / "loss.csv", results / f"{other.log}_loss.csv")
    copy_results(out, root, other.results)
    write_choices(out, root, other.name)
    content = f"{all_rows(rows)}\n\n{note_of_other(rows, choosing.source(out / 'measured.csv'), other)}"
    pages.between(root / "docs" / "experiments.md", other.mark, content)
    if other.name == costs.MODEL:
        pages.between(root / "docs" / "experiments.md", "costs", costs.page(costs.published(results)))
        pages.between(root / "docs" / "experiments.md", "losses", losses.published(results))
        write_readme(root)


def write_readme(root: Path) -> None:
    """Its table, of the committed results."""
    results = root / "benchmarks" / "results"
    content = readme(read(results / "experiments.csv"), costs.published(results))
    pages.between(root / "README.md", "experiments", content)


def read(results: Path) -> list[dict[str, str]]:
    """The rows of a table. Raises ValueError where there is none."""
    if not results.is_file():
        raise ValueError(f"--out must hold {results.name}, got {str(results.parent)!r}: run with --table first")
    with results.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def copy_results(out: Path, root: Path, name: str) -> None:
    """The table and its runs, where they are committed; and how long they took."""
    results = root / "benchmarks" / "results"
    for source, target in (("results.csv", ".csv"), ("results.md", ".md"), ("runs.jsonl", "_runs.jsonl")):
        shutil.copyfile(out / source, results / f"{name}{target}")
    pages.between(root / "docs" / "experiments.md", "durations", durations(results))
    pages.between(root / "docs" / "experiments.md", "checked", checked(results))


def write_choices(out: Path, root: Path, model: str) -> None:
    """measured.csv, and the table of docs/choosing.md, which is made from it."""
    file, page = root / "aoquant" / "tools" / "measured.csv", root / "docs" / "choosing.md"
    remember(out / "measured.csv", file, model)
    lines = page.read_text(encoding="utf-8").split("\n")
    first = lines.index(next(line for line in lines if line.startswith(f"| {choosing.HEADS[0]} |")))
    last = lines.index("", first)
    lines[first:last] = choosing.markdown(choosing.measured(file)).split("\n")
    page.write_text("\n".join(lines), encoding="utf-8")


def trained(rows: Sequence[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """aoquant's rows that were trained, each under the loss that validation pages chose."""
    return [r for r in rows if r["published"] == "True" and r["kind"] == "aoquant"]


def headlines(rows: Sequence[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """The headline rows of these."""
    return [r for r in trained(rows) if r["headline"] == "True"]


def readme(rows: Sequence[Mapping[str, str]], measured: Mapping[str, costs.Cost]) -> str:
    """Headline rows, the torchao row that each is compared with, and what the row cost, where that was measured."""
    lines = [
        (f"`{row['recipe']}`", *numbers(rows, row), *measured.get(row["row"], costs.Cost())) for row in headlines(rows)
    ]
    shown = len(HEADS) + len(costs.HEADS) * bool(measured)
    return table((*HEADS, *costs.HEADS)[:shown], [line[:shown] for line in lines])


def all_rows(rows: Sequence[Mapping[str, str]]) -> str:
    """All rows, with the torchao row that each is compared with and the difference, where any has one."""
    lines = [
        (f"`{row['row']}`", *numbers(rows, row), row[DIFFERENCE].partition(": ")[2] if beside(rows, row) else "")
        for row in trained(rows)
    ]
    heads = (*HEADS, DIFFERENCE)
    shown = len(heads) if any(beside(rows, row) for row in trained(rows)) else HEADS.index(TORCHAO)
    return table(heads[:shown], [line[:shown] for line in lines])


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
        error, mark = row[f"{name} sd"], f" {PREPARED}" * bool(row["as prepared"]) + f" {ENTROPY}" * by_entropy(row)
        return f"{float(row[name]):{form}}" + (f" ± {float(error):{form}}" if error else "") + mark

    return cell("QAT", ".2f"), cell("recovered %", ".1f"), row["seeds"]


def by_entropy(row: Mapping[str, str]) -> bool:
    """Whether validation pages chose cross entropy for a row that could be trained by distillation too."""
    return row["kind"] != "float" and row["loss"] == "ce"


def note(rows: Sequence[Mapping[str, str]], source: str, costed: bool) -> str:
    """What stands below the README's table, wrapped as its other text is. costed: the table has columns of costs."""
    words = (
        f"{source} {HOW_TO_READ} {tuned(rows)}torchao: the same budget, by its own `QATConfig`. "
        f"{as_prepared(rows, headlines(rows))}{marked(rows, headlines(rows))}{HOW_IT_COSTS * costed}"
        "Prepared equals converted in every run of aoquant's. "
        "[All rows](benchmarks/results/experiments.md), [how they are made](docs/experiments.md)."
    )
    picture = "![Word perplexity against bits a weight: PTQ, QAT, and torchao's QAT](docs/figures/bits.svg)"
    return wrapped(words).replace(UNBROKEN, " ") + f"\n\n{picture}"


def note_of_other(rows: Sequence[Mapping[str, str]], source: str, other: Other) -> str:
    """What stands below another model's table."""
    compared = any(beside(rows, row) for row in trained(rows))
    words = (
        f"{source} {HOW_TO_READ} {tuned(rows)}{as_prepared(rows, trained(rows))}{marked(rows, trained(rows))}{HOW_TO_COMPARE if compared else ''}"
        f"[All rows and checks](../benchmarks/results/{other.results}.md); "
        f"the model's [settings](../benchmarks/results/{other.log}.json) and "
        f"[loss](../benchmarks/results/{other.log}_loss.csv)."
    )
    return wrapped(words).replace(UNBROKEN, " ")


def tuned(rows: Sequence[Mapping[str, str]]) -> str:
    """A sentence on the fine-tuned float model, where it was run."""
    floats = [row for row in rows if row["kind"] == "float" and row["QAT"]]
    end = " (its rate is an end of the search)" if floats and floats[0]["rate at an end"] == "True" else ""
    return f"Float, fine-tuned on the same tokens: {float(floats[0]['QAT']):.2f}{end}. " if floats else ""


def marked(rows: Sequence[Mapping[str, str]], shown: Sequence[Mapping[str, str]]) -> str:
    """Sentences on rows by cross entropy, and on torchao's rows that store more bits than ours, where there are any."""
    said = ""
    if any(by_entropy(row) for row in shown):
        said = f"{ENTROPY} By cross entropy, which learns the text too: its share is not to be compared with others. "
    wider = {
        f"{float(bits):.2f} for `{row['row']}`"
        for row in shown
        if (bits := beside(rows, row).get("bits")) and float(bits) > float(row["bits"]) + 0.1
    }
    return said + (f"torchao's converted models store more bits: {', '.join(sorted(wider))}. " if wider else "")


def as_prepared(rows: Sequence[Mapping[str, str]], shown: Sequence[Mapping[str, str]]) -> str:
    """A sentence on the mark, where the table has it."""
    reasons = {reason for row in shown if (reason := beside(rows, row).get("as prepared"))}
    if not reasons:
        return ""
    return (
        f"{PREPARED} PTQ and QAT are scores of torchao's prepared model: converted layers did not run there "
        f'("{"; ".join(sorted(reasons)).replace(" ", UNBROKEN)}"). '
    )
