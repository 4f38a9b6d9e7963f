"""From OUT to the pages: the files that are committed, and the places that are written from them.

    benchmarks/results/experiments{.csv,.md,_runs.jsonl}          every row, the same to read, every run
    benchmarks/results/pretrain_llama.json, ..._loss.csv          what pretrain.py logged beside the model, with --model
    docs/figures/bits.svg                                         perplexity against bits a weight
    docs/evidence/experiments.md, between pairs of marks          all rows; both losses; torchao's by cross entropy;
                                                                  tricks; costs; seconds; checks

`--publish earlier` and `--publish moe` write the first two of another model, under its name; experts have the second
table of docs/evidence/experiments.md. Numbers of two models are not compared. The README and docs/choosing.md show
public models: `eval/real_models/publish.py`.

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

from aoquant.tools.markdown import table, wrapped
from experiments import costs, losses, torchao_by_cross_entropy, tricks_page
from experiments.checked import checked
from experiments.durations import durations

ROOT = Path(__file__).resolve().parents[2]
UNBROKEN = "\0"  # a space at which no line is wrapped: what follows may mean something to Markdown, as "- " does
SHARE = "(PTQ - QAT) / (PTQ - float)".replace(" ", UNBROKEN)
PREPARED = "†"  # marks what was scored as prepared
HOW_TO_READ = (
    "Scores are of converted models, unless marked; ±: deviation over seeds. "
    f"Recovered: {SHARE} in log perplexity; the better PTQ is, the less there is to recover."
)
HOW_TO_COMPARE = (
    "The last column is ours less torchao's, with its 95 % interval over paired seeds: below zero, ours is better. "
)
TORCHAO = "torchao's QAT"
DIFFERENCE = "log perplexity less the other's"
SCORES = ("recipe", "bits", "PTQ", "QAT", "recovered, %", TORCHAO, "recovered, %")


@dataclass(frozen=True)
class Destination:
    """Where one model's table goes. results, log: names in benchmarks/results; mark: of its place in
    docs/evidence/experiments.md, "" for none; option: of the model.
    """

    results: str
    log: str
    mark: str
    option: str = "--model"


MAIN = "main"
DESTINATIONS = {
    MAIN: Destination("experiments", "pretrain_llama", "all rows"),
    "earlier": Destination("experiments_earlier", "pretrain_llama_earlier", ""),
    "moe": Destination("experiments_moe", "pretrain_moe", "experts", "--moe-model"),
}


def publish(out: Path, name: str = MAIN, model: Path | None = None, root: Path = ROOT) -> None:
    """Write all of it from a table in `out`.

    name: of DESTINATIONS. model: as pretrain.py wrote it; its log is kept then.

    Raises:
        ValueError: there is no table, no log beside the model, or a page has no place for it.
    """
    made, rows = DESTINATIONS[name], read(out / "results.csv")
    if not (headlines(rows) if name == MAIN else trained(rows)):
        raise ValueError(f"{out / 'results.csv'} has no{' headline' * (name == MAIN)} row that was trained")
    results, page = root / "benchmarks" / "results", root / "docs" / "evidence" / "experiments.md"
    if model is not None:
        copy_log(model, made, results)
    for source, target in (("results.csv", ".csv"), ("results.md", ".md"), ("runs.jsonl", "_runs.jsonl")):
        shutil.copyfile(out / source, results / f"{made.results}{target}")
    pages.between(page, "durations", durations(results))
    pages.between(page, "checked", checked(results))
    if made.mark:
        source = (out / "source.txt").read_text(encoding="utf-8")
        pages.between(page, made.mark, f"{all_rows(rows)}\n\n{note_of_all(rows, source, made)}")
    if name == MAIN:
        pages.between(page, "costs", costs.page(costs.published(results)))
        pages.between(page, "losses", losses.published(results))
        pages.between(page, "torchao by cross entropy", torchao_by_cross_entropy.published(results))
        pages.between(page, "tricks", tricks_page.published(results))
        subprocess.run([sys.executable, str(root / "docs" / "figures" / "draw.py")], check=True)


def copy_log(model: Path, made: Destination, results: Path) -> None:
    """What pretrain.py wrote beside `model`. Raises ValueError where that is not there."""
    if not (model.parent / "train_log.json").is_file():
        raise ValueError(
            f"{made.option} must be the folder model of a run of eval/pretrain.py with train_log.json beside it, "
            f"got {str(model)!r}"
        )
    log = json.loads((model.parent / "train_log.json").read_text(encoding="utf-8"))
    del log["losses"]  # the curve's
    (results / f"{made.log}.json").write_text(json.dumps(log, indent=1) + "\n", encoding="utf-8")
    shutil.copyfile(model.parent / "loss.csv", results / f"{made.log}_loss.csv")


def read(results: Path) -> list[dict[str, str]]:
    """The rows of a table. Raises ValueError where there is none."""
    if not results.is_file():
        raise ValueError(f"--out must hold {results.name}, got {str(results.parent)!r}: run with --table first")
    with results.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def trained(rows: Sequence[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """aoquant's rows that were trained, LoRA's among them, each under the loss that pages show; without tricks."""
    return [r for r in rows if r["published"] == "True" and r["kind"] in ("aoquant", "lora") and not r["trick"]]


def headlines(rows: Sequence[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """The headline rows of these."""
    return [r for r in trained(rows) if r["headline"] == "True"]


def all_rows(rows: Sequence[Mapping[str, str]]) -> str:
    """All rows with their seeds, the torchao row that each is compared with, and the difference, where any has one."""
    lines = []
    for row in trained(rows):
        other = beside(rows, row)
        compared = (*recovery(other), other.get("seeds", ""), row[DIFFERENCE].partition(": ")[2] if other else "")
        lines.append((f"`{row['row']}`", *scores(row), *recovery(row), row["seeds"], *compared))
    ours = SCORES.index(TORCHAO)
    heads = (*SCORES[:ours], "seeds", *SCORES[ours:], "seeds", DIFFERENCE)
    shown = len(heads) if any(beside(rows, row) for row in trained(rows)) else ours + 1
    return table(heads[:shown], [line[:shown] for line in lines])


def scores(row: Mapping[str, str]) -> tuple[str, str]:
    """Bits a weight, and PTQ."""
    return f"{float(row['bits']):.2f}", f"{float(row['PTQ']):.2f}"


def beside(rows: Sequence[Mapping[str, str]], row: Mapping[str, str]) -> Mapping[str, str]:
    """The torchao row that a row is compared with; empty where there is none."""
    return next(
        (r for r in rows if r["row"] == row["against"] and r["kind"] == "torchao" and r["published"] == "True"), {}
    )


def recovery(row: Mapping[str, str]) -> tuple[str, str]:
    """Perplexity and recovered share of a row, mean and spread over seeds, marked where they are not the converted
    model's.
    """
    if not row.get("QAT"):
        return "", ""

    def cell(name: str, form: str) -> str:
        if not row[name]:
            return ""
        error, mark = row[f"{name} sd"], f" {PREPARED}" * bool(row["as prepared"])
        return f"{float(row[name]):{form}}" + (f" ± {float(error):{form}}" if error else "") + mark

    return cell("QAT", ".2f"), cell("recovered %", ".1f")


def note_of_all(rows: Sequence[Mapping[str, str]], source: str, made: Destination) -> str:
    """Return what stands below a table of docs/evidence/experiments.md."""
    compared = any(beside(rows, row) for row in trained(rows))
    words = (
        f"{source} {HOW_TO_READ} {floats(rows)}{as_prepared(rows, trained(rows))}{wider(rows, trained(rows))}{HOW_TO_COMPARE if compared else ''}"
        f"[All rows and checks](../../benchmarks/results/{made.results}.md); "
        f"the model's [settings](../../benchmarks/results/{made.log}.json) and "
        f"[loss](../../benchmarks/results/{made.log}_loss.csv)."
    )
    return wrapped(words).replace(UNBROKEN, " ")


def floats(rows: Sequence[Mapping[str, str]]) -> str:
    """A sentence on the float model, and the fine-tuned one, where it was run."""
    (score,) = {f"{float(row['float']):.2f}" for row in trained(rows)}
    tuned = [row for row in rows if row["kind"] == "float" and row["QAT"]]
    end = " (its rate is an end of the search)" if tuned and tuned[0]["rate at an end"] == "True" else ""
    more = f", fine-tuned on the same tokens {float(tuned[0]['QAT']):.2f}{end}" if tuned else ""
    return f"Float: {score}{more}. "


def wider(rows: Sequence[Mapping[str, str]], shown: Sequence[Mapping[str, str]]) -> str:
    """A sentence on torchao's rows that store more bits than ours, where there are any."""
    found = {
        f"{float(bits):.2f} for `{row['row']}`"
        for row in shown
        if (bits := beside(rows, row).get("bits")) and float(bits) > float(row["bits"]) + 0.1
    }
    return f"torchao's converted models store more bits: {', '.join(sorted(found))}. " if found else ""


def as_prepared(rows: Sequence[Mapping[str, str]], shown: Sequence[Mapping[str, str]]) -> str:
    """A sentence on the mark, where the table has it."""
    reasons = {reason for row in shown if (reason := beside(rows, row).get("as prepared"))}
    if not reasons:
        return ""
    return (
        f"{PREPARED} PTQ and QAT are scores of torchao's prepared model: converted layers did not run there "
        f'("{"; ".join(sorted(reasons)).replace(" ", UNBROKEN)}"). '
    )
