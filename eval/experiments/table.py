"""From runs.jsonl to the table: results.csv, results.md, and two plots.

The learning rate of a row and loss is the one that validation pages chose; its runs of all seeds are the row. A rate
that is the lowest or highest of those tried is marked: a better one may lie beyond it, and the next call will try it.
Where a row was trained by both losses for as many seeds, validation pages choose the one that is published, else it is
the one with more. Spread is the standard deviation over seeds. Recovered is (PTQ - QAT) / (PTQ - float) in log
perplexity, mean and spread over seeds. Rows that name another one (`against`) are compared with it seed by seed: a seed
fixes the order of the text for both, so what the order does to both drops out; the two are not told apart when zero is
within the difference's 95 % interval of Student's t.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from scipy.stats import t as student_t

from experiments.costs import cost_of
from experiments.plots import plot
from experiments.records import Run, chosen_rate, float_run, searched
from experiments.rows import Row
from experiments.verdicts import COLUMNS, Verdict, verdicts

Found = Mapping[Run, Mapping[str, Any]]
KINDS = {"dense": "Llama", "moe": "Mixtral"}  # of models


@dataclass(frozen=True)
class Line:
    """A row under one loss. rate, ptq: None where not there, or not run. runs, checked: results by seed. at_end: no
    rate was tried beyond this one. given: no rate was tried. as_prepared: why a prepared model was scored in place of a
    converted one, if any.
    """

    row: Row
    loss: str
    rate: float | None
    float_model: float
    ptq: float | None
    runs: dict[int, Mapping[str, Any]]
    checked: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    as_prepared: str = ""
    at_end: bool = False
    given: bool = False

    @property
    def perplexities(self) -> dict[int, float]:
        """A word on test pages, by seed."""
        return {seed: run["word_perplexity"] for seed, run in self.runs.items()}

    def validation(self) -> dict[int, float]:
        """Perplexity a token on validation pages, by seed."""
        return {seed: math.exp(run["validation_loss"]) for seed, run in self.runs.items()}

    def verdicts(self) -> list[Verdict]:
        """What was checked of it."""
        return verdicts(self.row.kind, self.row.recipe, self.runs, self.checked, self.as_prepared)

    def recovered(self) -> list[float]:
        """Shares by seed; empty where PTQ loses nothing, or was not run."""
        if self.row.kind == "float" or self.ptq is None or self.ptq <= self.float_model:
            return []
        lost = math.log(self.ptq / self.float_model)
        return [math.log(self.ptq / p) / lost for p in self.perplexities.values()]


def lines(rows: Mapping[str, Row], found: Found) -> list[Line]:
    """Every row and loss that has a score: of PTQ alone while learning rates are still being tried."""
    made = []
    for row in rows.values():
        whole = found.get(float_run(row))
        if whole is None:
            continue
        untrained = found.get(Run(row.name, "ptq")) or {}
        ptq = untrained.get("word_perplexity")
        for loss in row.losses:
            tried = searched(found, row.name, loss)
            rate = chosen_rate(found, row.name, loss, row.rates(loss))
            if rate is None:
                rate = _rate_of_runs(found, row.name, loss, tried)
            run = Run(row.name, "qat", loss, rate or 0.0)
            runs = {} if rate is None else _seeds(found, run)
            if runs or (loss == row.losses[0] and (ptq is not None or row.kind == "float")):
                reasons = [r["as_prepared"] for r in (untrained, *runs.values()) if "as_prepared" in r]
                checked = {seed: r for seed, r in _seeds(found, replace(run, stage="checks")).items() if seed in runs}
                at_end = len(tried) > 1 and rate in (min(tried), max(tried))
                score = whole["word_perplexity"]
                given = bool(runs) and not tried
                made.append(Line(row, loss, rate, score, ptq, runs, checked, (reasons or [""])[0], at_end, given))
    return made


def _rate_of_runs(found: Found, row: str, loss: str, tried: Mapping[float, float]) -> float | None:
    """The rate of whole runs whose search ended where today's goes on, or that had none: `--rates` gave it."""
    rates = {run.rate for run in found if (run.row, run.stage, run.loss) == (row, "qat", loss)}
    best = min(tried, key=tried.__getitem__) if tried else min(rates, default=None)
    return best if best in rates else None


def _seeds(found: Found, of: Run) -> dict[int, Mapping[str, Any]]:
    """The results of a run under every seed."""
    return {run.seed: found[run] for run in sorted(found, key=lambda run: run.seed) if replace(run, seed=of.seed) == of}


def preferred(made: Sequence[Line]) -> dict[str, str]:
    """The loss of each trained row that is published: the one with the lower mean loss on validation pages. A loss that
    has fewer seeds than another is not chosen.
    """
    chosen: dict[str, Line] = {}
    for line in (x for x in made if x.runs):
        before = chosen.setdefault(line.row.name, line)
        mine, other = line.validation(), before.validation()
        if (-len(mine), mean(mine.values())) < (-len(other), mean(other.values())):
            chosen[line.row.name] = line
    return {name: line.loss for name, line in chosen.items()}


def spread(values: Sequence[float], form: str) -> str:
    """Mean and standard deviation."""
    if not values:
        return ""
    error = f" ± {stdev(values):{form}}" if len(values) > 1 else ""
    return f"{mean(values):{form}}{error}"


def difference(mine: Mapping[int, float], other: Mapping[int, float]) -> str:
    """Of log perplexities, paired by seed, with the verdict of Student's t at 95 %."""
    pairs = [math.log(mine[s] / other[s]) for s in sorted(mine.keys() & other.keys())]
    if len(pairs) < 2:
        return "" if not pairs else f"{pairs[0]:+.4f} (one seed)"
    error = stdev(pairs) / math.sqrt(len(pairs))
    reach = float(student_t.ppf(0.975, len(pairs) - 1)) * error
    verdict = "not told apart" if abs(mean(pairs)) <= reach else ("better" if mean(pairs) < 0 else "worse")
    return f"{mean(pairs):+.4f} ± {reach:.4f}, {len(pairs)} seeds: {verdict}"


def broken(rows: Mapping[str, Row], found: Found) -> list[str]:
    """What must hold of aoquant's rows, the contract of this library and its checks, and does not."""
    return [
        f"{x.row.name}, {x.loss}: {verdict.column} {verdict.said}"
        for x in lines(rows, found)
        if x.row.kind in ("aoquant", "lora")
        for verdict in x.verdicts()
        if not verdict.holds
    ]


def cells(line: Line, all_lines: Sequence[Line], found: Found) -> dict[str, Any]:
    """One row of results.csv and results.md, by head."""
    bits = [run["weight_bits"] for run in line.runs.values() if "weight_bits" in run]
    verdicts = {verdict.column: verdict.said for verdict in line.verdicts()}
    other = [x for x in all_lines if x.row.name == line.row.against and x.loss == line.loss]
    cost = cost_of(found, line.row.name, float_run(line.row).row)
    return {
        "row": line.row.name,
        "bits": f"{bits[-1]:.2f}" if bits else "",
        "loss": line.loss,
        "rate": "" if line.rate is None else f"{line.rate:g}" + ", at an end" * line.at_end + ", given" * line.given,
        "seeds": len(line.perplexities),
        "float": f"{line.float_model:.3f}",
        "PTQ": "" if line.ptq is None else f"{line.ptq:.3f}",
        "QAT": spread(list(line.perplexities.values()), ".3f"),
        "recovered %": spread([100 * share for share in line.recovered()], ".1f"),
        "log perplexity less the other's": f"{line.row.against}: {difference(line.perplexities, other[0].perplexities)}"
        if other and other[0].perplexities and line.perplexities
        else "",
        "validation, log less the other's": difference(line.validation(), other[0].validation()) if other else "",
        **{column: verdicts.get(column, "") for column in COLUMNS},
        "train tokens/s over bf16's": cost.training,
        "peak memory over bf16's": cost.memory,
        "model MB": cost.megabytes,
        "generate tokens/s over bf16's": cost.generate,
    }


def numbers(line: Line, published: Mapping[str, str]) -> dict[str, Any]:
    """The columns of results.csv that pages and figures are made from; results.md has mean and spread in one cell.

    published: the loss of each row, as `preferred` returns it.
    """
    qat, shares = list(line.perplexities.values()), [100 * share for share in line.recovered()]
    bits = [run["weight_bits"] for run in line.runs.values() if "weight_bits" in run]
    columns: dict[str, Any] = {"row": line.row.name, "kind": line.row.kind, "recipe": line.row.recipe}
    columns |= {"headline": line.row.headline, "against": line.row.against, "loss": line.loss, "rate": line.rate}
    columns |= {"rate at an end": line.at_end, "published": published.get(line.row.name) == line.loss}
    columns |= {"plain": plain(line.row), "seeds": len(qat), "as prepared": line.as_prepared}
    columns |= {"bits": bits[-1] if bits else "", "float": line.float_model, "PTQ": line.ptq}
    for name, values in (("QAT", qat), ("recovered %", shares)):
        columns |= {name: mean(values) if values else "", f"{name} sd": stdev(values) if len(values) > 1 else ""}
    return columns


def write(out: Path, rows: Mapping[str, Row], found: Found, facts: Mapping[str, Any]) -> str:
    """results.csv, results.md and the plots; returns the table."""
    from tabulate import tabulate

    made = lines(rows, found)
    published = preferred(made)
    table = [cells(line, made, found) for line in made]
    if not table:
        return "nothing is scored yet"
    with (out / "results.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys([*numbers(made[0], published), *table[0]])))
        writer.writeheader()
        writer.writerows({**shown, **numbers(line, published)} for shown, line in zip(table, made, strict=True))
    shown = [key for key in table[0] if any(r[key] != "" for r in table)]
    body = tabulate([[r[key] for key in shown] for r in table], shown, tablefmt="github", disable_numparse=True)
    head = "\n".join(f"- {key}: {value}" for key, value in facts.items())
    abouts = "\n".join(f"- `{row.name}`: {row.about}" for row in rows.values() if any(x.row is row for x in made))
    (out / "results.md").write_text(f"# Experiments\n\n{head}\n\n{body}\n\n{abouts}\n", encoding="utf-8")
    write_measured(out / "measured.csv", made, facts)
    plot(out, made, published)
    return body


def plain(row: Row, model: str = "dense") -> bool:
    """aoquant's recipes as they are, on this model: without a trick."""
    return row.kind == "aoquant" and row.model == model and not row.trick


def write_measured(path: Path, made: Sequence[Line], facts: Mapping[str, Any]) -> None:
    """What `aoquant recipes --for` and docs/choosing.md read: plain rows, each under the loss that validation chose.

    Of the dense model, or of the model of experts where it is alone.
    """
    published, model = preferred(made), "dense" if "dense tokens a run" in facts else "moe"
    shown = [x for x in made if plain(x.row, model) and published.get(x.row.name) == x.loss and x.ptq is not None]
    size, tokens = facts.get(f"{model} parameters"), facts[f"{model} tokens a run"] / 1e6
    known = f" with {size / 1e6:.1f} M parameters" if size else ""
    words = (
        f"Word perplexity by lm-eval's wikitext of a {KINDS[model]}{known}; QAT {by(made, shown)}, "
        f"{tokens:.1f} M tokens, mean over seeds. {facts['device']}, {str(facts['date'])[:10]}."
    )
    with path.open("w", newline="", encoding="utf-8") as file:
        file.write(f"# {words}\n")
        writer = csv.writer(file)
        writer.writerow(["recipe", "bits", "float", "ptq", "qat", "seeds", "loss"])
        for line in shown:
            scores = list(line.perplexities.values())
            numbers = (line.runs[max(line.runs)]["weight_bits"], line.float_model, line.ptq, mean(scores))
            writer.writerow([line.row.recipe, *(f"{n:.3f}" for n in numbers), len(scores), line.loss])


def by(made: Sequence[Line], shown: Sequence[Line]) -> str:
    """How the lines that are shown were trained, in words."""
    names = {x.row.name for x in shown}
    if not any(x.loss == "ce" and x.runs for x in made if x.row.name in names):
        return "by distillation (cross entropy was not run)"
    ce = [x.row.name for x in shown if x.loss == "ce"]
    if not ce:
        seeds = {x.row.name: len(x.runs) for x in shown}
        fewer = any(x.loss == "ce" and 0 < len(x.runs) < seeds[x.row.name] for x in made if x.row.name in seeds)
        return f"by distillation (cross entropy {'has fewer seeds' if fewer else 'was chosen for no row'})"
    return f"by distillation or cross entropy as validation pages chose (the latter for {', '.join(ce)})"
