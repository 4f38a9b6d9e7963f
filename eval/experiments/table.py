"""From runs.jsonl to the table: results.csv, results.md, and two plots.

The learning rate of a row and loss is the one that validation pages chose; its runs of all seeds are the row. A rate
that is the lowest or highest of those tried is marked: a better one may lie beyond it, and the next call will try it.
Pages show a row under its first loss, distillation for all but the float model: cross entropy learns the text too, so
only rows of one loss can be compared, and `losses.py` compares the losses. Spread is the standard deviation over seeds.
Recovered is (PTQ - QAT) / (PTQ - float) in log perplexity, mean and spread over seeds. Rows that name another one
(`against`) are compared with it seed by seed: a seed fixes the order of the text for both, so what the order does to
both drops out; the two are not told apart when zero is within the difference's 95 % interval of Student's t.
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
LOSS_IN_WORDS = {"kl": "distillation", "ce": "cross entropy"}  # a loss in words


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
                reasons = [r["as_prepared"] for r in (runs.values() if runs else (untrained,)) if "as_prepared" in r]
                # PTQ beside runs of its kind alone: a prepared and a converted score make no share
                comparable = ptq if bool(reasons) == ("as_prepared" in untrained) else None
                checked = {seed: r for seed, r in _seeds(found, replace(run, stage="checks")).items() if seed in runs}
                at_end = len(tried) > 1 and rate in (min(tried), max(tried))
                score = whole["word_perplexity"]
                given = bool(runs) and not tried
                made.append(
                    Line(row, loss, rate, score, comparable, runs, checked, (reasons or [""])[0], at_end, given)
                )
    return made


def _rate_of_runs(found: Found, row: str, loss: str, tried: Mapping[float, float]) -> float | None:
    """The rate of whole runs whose search ended where today's goes on, or that had none: `--rates` gave it."""
    rates = {run.rate for run in found if (run.row, run.stage, run.loss) == (row, "qat", loss)}
    best = min(tried, key=tried.__getitem__) if tried else min(rates, default=None)
    return best if best in rates else None


def _seeds(found: Found, of: Run) -> dict[int, Mapping[str, Any]]:
    """The results of a run under every seed."""
    return {run.seed: found[run] for run in sorted(found, key=lambda run: run.seed) if replace(run, seed=of.seed) == of}


def shown_losses(made: Sequence[Line]) -> dict[str, str]:
    """The loss under which pages show each trained row: the first of the row's that was run."""
    shown: dict[str, str] = {}
    for line in made:  # in the order of a row's losses
        if line.runs:
            shown.setdefault(line.row.name, line.loss)
    return shown


@dataclass(frozen=True)
class Difference:
    """Of log perplexities, paired by seed. reach: half the 95 % interval of Student's t; NaN of one seed."""

    mean: float
    reach: float
    seeds: int

    @property
    def told_apart(self) -> bool:
        """Whether zero lies outside the interval."""
        return abs(self.mean) > self.reach

    def __str__(self) -> str:
        if self.seeds == 1:
            return f"{self.mean:+.4f} (one seed)"
        verdict = ("better" if self.mean < 0 else "worse") if self.told_apart else "not told apart"
        return f"{self.mean:+.4f} ± {self.reach:.4f}, {self.seeds} seeds: {verdict}"


def difference(mine: Mapping[int, float], other: Mapping[int, float]) -> Difference | None:
    """Of perplexities by seed, over the seeds that both have; None where there is none."""
    pairs = [math.log(mine[seed] / other[seed]) for seed in sorted(mine.keys() & other.keys())]
    if not pairs:
        return None
    error = stdev(pairs) / math.sqrt(len(pairs)) if len(pairs) > 1 else math.nan
    reach = float(student_t.ppf(0.975, len(pairs) - 1)) * error if len(pairs) > 1 else math.nan
    return Difference(mean(pairs), reach, len(pairs))


def spread(values: Sequence[float], form: str) -> str:
    """Mean and standard deviation."""
    if not values:
        return ""
    error = f" ± {stdev(values):{form}}" if len(values) > 1 else ""
    return f"{mean(values):{form}}{error}"


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
    beside = [x for x in all_lines if x.row.name == line.row.against and x.loss == line.loss]
    on_test = difference(line.perplexities, beside[0].perplexities) if beside else None
    on_validation = difference(line.validation(), beside[0].validation()) if beside else None
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
        "log perplexity less the other's": "" if on_test is None else f"{line.row.against}: {on_test}",
        "validation, log less the other's": "" if on_validation is None else str(on_validation),
        **{column: verdicts.get(column, "") for column in COLUMNS},
        "train tokens/s over bf16's": cost.training,
        "peak memory over bf16's": cost.memory,
        "model MB": cost.megabytes,
        "generate tokens/s over bf16's": cost.generate,
    }


def numbers(line: Line, shown: Mapping[str, str]) -> dict[str, Any]:
    """The columns of results.csv that pages and figures are made from; results.md has mean and spread in one cell.

    shown: as `shown_losses` returns it.
    """
    qat, shares = list(line.perplexities.values()), [100 * share for share in line.recovered()]
    bits = [run["weight_bits"] for run in line.runs.values() if "weight_bits" in run]
    columns: dict[str, Any] = {"row": line.row.name, "kind": line.row.kind, "recipe": line.row.recipe}
    columns |= {"headline": line.row.headline, "against": line.row.against, "loss": line.loss, "rate": line.rate}
    columns |= {"rate at an end": line.at_end, "published": shown.get(line.row.name) == line.loss}
    columns |= {"plain": plain(line.row), "trick": line.row.trick, "seeds": len(qat), "as prepared": line.as_prepared}
    columns |= {"bits": bits[-1] if bits else "", "float": line.float_model, "PTQ": line.ptq}
    for name, values in (("QAT", qat), ("recovered %", shares)):
        columns |= {name: mean(values) if values else "", f"{name} sd": stdev(values) if len(values) > 1 else ""}
    return columns


def write(out: Path, rows: Mapping[str, Row], found: Found, facts: Mapping[str, Any]) -> str:
    """results.csv, results.md and the plots; returns the table."""
    from tabulate import tabulate

    made = lines(rows, found)
    losses = shown_losses(made)
    table = [cells(line, made, found) for line in made]
    if not table:
        return "nothing is scored yet"
    with (out / "results.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys([*numbers(made[0], losses), *table[0]])))
        writer.writeheader()
        writer.writerows({**shown, **numbers(line, losses)} for shown, line in zip(table, made, strict=True))
    shown = [key for key in table[0] if any(r[key] != "" for r in table)]
    body = tabulate([[r[key] for key in shown] for r in table], shown, tablefmt="github", disable_numparse=True)
    head = "\n".join(f"- {key}: {value}" for key, value in facts.items())
    abouts = "\n".join(f"- `{row.name}`: {row.about}" for row in rows.values() if any(x.row is row for x in made))
    (out / "results.md").write_text(f"# Experiments\n\n{head}\n\n{body}\n\n{abouts}\n", encoding="utf-8")
    (out / "source.txt").write_text(source(made, facts), encoding="utf-8")
    plot(out, made, losses)
    return body


def plain(row: Row, model: str = "dense") -> bool:
    """aoquant's recipes as they are, on this model: without a trick."""
    return row.kind == "aoquant" and row.model == model and not row.trick


def source(made: Sequence[Line], facts: Mapping[str, Any]) -> str:
    """Return the sentence on model, budget, device and date, which pages show below the table.

    Of the dense model, or of the model of experts where it is alone.
    """
    losses, model = shown_losses(made), "dense" if "dense tokens a run" in facts else "moe"
    shown = [x for x in made if plain(x.row, model) and losses.get(x.row.name) == x.loss and x.ptq is not None]
    size, tokens = facts.get(f"{model} parameters"), facts[f"{model} tokens a run"] / 1e6
    known = f" with {size / 1e6:.1f} M parameters" if size else ""
    by = " or ".join(sorted({LOSS_IN_WORDS[line.loss] for line in shown}, reverse=True))
    return (
        f"Word perplexity by lm-eval's wikitext of a {KINDS[model]}{known}; QAT by {by}, "
        f"{tokens:.1f} M tokens, mean over seeds. {facts['device']}, {facts['date']}."
    )
