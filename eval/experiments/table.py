"""From runs.jsonl to the table: results.csv, results.md, and two plots.

The learning rate of a row and loss is the one that validation pages chose; its runs of all seeds are the row. Spread is
the standard deviation over seeds. Recovered is (PTQ - QAT) / (PTQ - float) in log perplexity, mean and spread over
seeds. Rows that name another one (`against`) are compared with it seed by seed: a seed fixes the order of the text for
both, so what the order does to both drops out; the difference is called noise when zero is within its 95 % interval
of Student's t.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from scipy.stats import t as student_t

from experiments.records import Run, chosen_rate, float_run
from experiments.rows import Row

Found = Mapping[Run, Mapping[str, Any]]


@dataclass(frozen=True)
class Line:
    """A row under one loss. perplexities: of the converted model, by seed. None: not there, or not run. as_prepared: why
    a prepared model was scored in place of a converted one, if one was.
    """

    row: Row
    loss: str
    rate: float | None
    float_model: float
    ptq: float | None
    perplexities: dict[int, float]
    runs: list[Mapping[str, Any]]
    as_prepared: str = ""

    def validation(self) -> dict[int, float]:
        """Perplexity a token on validation pages, by seed."""
        return {run["seed"]: math.exp(run["validation_loss"]) for run in self.runs if "seed" in run}

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
            rate = chosen_rate(found, row.name, loss, row.rates(loss))
            runs = {} if rate is None else _seeds(found, row.name, loss, rate)
            scores = {seed: r["word_perplexity"] for seed, r in runs.items()}
            shown = loss == row.losses[0] and (ptq is not None or row.kind == "float")
            if scores or shown:
                score, results = whole["word_perplexity"], list(runs.values())
                reasons = [r["as_prepared"] for r in (untrained, *results) if "as_prepared" in r]
                made.append(Line(row, loss, rate, score, ptq, scores, results, (reasons or [""])[0]))
    return made


def _seeds(found: Found, row: str, loss: str, rate: float) -> dict[int, Mapping[str, Any]]:
    runs = {
        run.seed: r for run, r in found.items() if (run.row, run.stage, run.loss, run.rate) == (row, "qat", loss, rate)
    }
    return dict(sorted(runs.items()))


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
    verdict = "within noise" if abs(mean(pairs)) <= reach else ("better" if mean(pairs) < 0 else "worse")
    return f"{mean(pairs):+.4f} ± {reach:.4f}, {len(pairs)} seeds: {verdict}"


def before_is_after(line: Line) -> str:
    """Whether the prepared and the converted model have the same perplexity, to every digit, in all runs."""
    if line.as_prepared:
        return f"scored as prepared: {line.as_prepared}"
    pairs = [(r.get("prepared_word_perplexity"), r["word_perplexity"]) for r in line.runs]
    if line.row.kind == "float" or not pairs:
        return ""
    off = max(abs(math.log(a / b)) for a, b in pairs)
    return "equal" if all(a == b for a, b in pairs) else f"differ by {off:.1e}"


def broken(rows: Mapping[str, Row], found: Found) -> list[str]:
    """aoquant's rows whose perplexity is another one after convert: the contract of this library."""
    ours = [line for line in lines(rows, found) if line.row.kind in ("aoquant", "lora")]
    return [
        f"{x.row.name}, {x.loss}: before and after convert {said}"
        for x in ours
        if (said := before_is_after(x)) not in ("", "equal")
    ]


def cells(line: Line, all_lines: Sequence[Line], found: Found) -> dict[str, Any]:
    """One row of results.csv and results.md, by head."""
    last = {k: v for run in line.runs for k, v in run.items()} | dict(found.get(Run(line.row.name, "checks"), {}))
    other = [x for x in all_lines if x.row.name == line.row.against and x.loss == line.loss]
    cost = found.get(Run(line.row.name, "cost"), {})
    bf16 = found.get(Run(float_run(line.row).row, "cost"), {})

    def over(key: str) -> str:
        return f"{cost[key] / bf16[key]:.2f}" if cost.get(key) and bf16.get(key) else ""

    return {
        "row": line.row.name,
        "bits": f"{last['weight_bits']:.2f}" if "weight_bits" in last else "",
        "loss": line.loss,
        "rate": "" if line.rate is None else f"{line.rate:g}",
        "seeds": len(line.perplexities),
        "float": f"{line.float_model:.3f}",
        "PTQ": "" if line.ptq is None else f"{line.ptq:.3f}",
        "QAT": spread(list(line.perplexities.values()), ".3f"),
        "recovered %": spread([100 * share for share in line.recovered()], ".1f"),
        "log perplexity less the other's": f"{line.row.against}: {difference(line.perplexities, other[0].perplexities)}"
        if other and other[0].perplexities and line.perplexities
        else "",
        "validation, log less the other's": difference(line.validation(), other[0].validation()) if other else "",
        "before and after convert": before_is_after(line),
        "exported, by transformers": last.get("transformers_word_perplexity", ""),
        "codes on a CPU": {True: "equal", False: "differ", None: ""}[last.get("cpu_codes_equal")],
        "train tokens/s over bf16's": over("train_tokens_s"),
        "peak memory over bf16's": over("peak_bytes"),
        "model MB": f"{cost['model_bytes'] / 1e6:.1f}" if "model_bytes" in cost else "",
        "generate tokens/s over bf16's": over("generate_tokens_s"),
    }


def numbers(line: Line) -> dict[str, Any]:
    """The columns of results.csv that figures are drawn from; results.md has mean and spread in one cell."""
    qat, shares = list(line.perplexities.values()), [100 * share for share in line.recovered()]
    bits = [run["weight_bits"] for run in line.runs if "weight_bits" in run]
    columns: dict[str, Any] = {"row": line.row.name, "kind": line.row.kind, "recipe": line.row.recipe}
    columns |= {"headline": line.row.headline, "against": line.row.against, "loss": line.loss, "rate": line.rate}
    columns |= {"seeds": len(qat), "as prepared": line.as_prepared}
    columns |= {"bits": bits[-1] if bits else "", "float": line.float_model, "PTQ": line.ptq}
    for name, values in (("QAT", qat), ("recovered %", shares)):
        columns |= {name: mean(values) if values else "", f"{name} sd": stdev(values) if len(values) > 1 else ""}
    return columns


def write(out: Path, rows: Mapping[str, Row], found: Found, facts: Mapping[str, Any]) -> str:
    """results.csv, results.md and the plots; returns the table."""
    from tabulate import tabulate

    made = lines(rows, found)
    table = [cells(line, made, found) for line in made]
    if not table:
        return "nothing is scored yet"
    with (out / "results.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys([*numbers(made[0]), *table[0]])))
        writer.writeheader()
        writer.writerows({**shown, **numbers(line)} for shown, line in zip(table, made, strict=True))
    shown = [key for key in table[0] if any(r[key] != "" for r in table)]
    body = tabulate([[r[key] for key in shown] for r in table], shown, tablefmt="github", disable_numparse=True)
    head = "\n".join(f"- {key}: {value}" for key, value in facts.items())
    abouts = "\n".join(f"- `{row.name}`: {row.about}" for row in rows.values() if any(x.row is row for x in made))
    (out / "results.md").write_text(f"# Experiments\n\n{head}\n\n{body}\n\n{abouts}\n", encoding="utf-8")
    write_measured(out / "measured.csv", made, facts)
    plot(out, made)
    return body


def write_measured(path: Path, made: Sequence[Line], facts: Mapping[str, Any]) -> None:
    """What `aoquant recipes --for` and docs/choosing.md read: aoquant's recipes distilled, of the dense model, as they
    are without a trick.
    """
    model, tokens = facts["dense parameters"] / 1e6, facts["dense tokens a run"] / 1e6
    words = (
        f"Word perplexity by lm-eval's wikitext of a Llama with {model:.1f} M parameters; QAT by distillation, "
        f"{tokens:.1f} M tokens, mean over seeds. {facts['device']}, {str(facts['date'])[:10]}."
    )
    with path.open("w", newline="", encoding="utf-8") as file:
        file.write(f"# {words}\n")
        writer = csv.writer(file)
        writer.writerow(["recipe", "bits", "float", "ptq", "qat", "seeds"])
        for line in made:
            plain = line.row.kind == "aoquant" and line.row.model == "dense" and not line.row.trick
            if plain and line.loss == "kl" and line.perplexities and line.ptq is not None:
                scores = list(line.perplexities.values())
                numbers = (line.runs[-1]["weight_bits"], line.float_model, line.ptq, mean(scores))
                writer.writerow([line.row.recipe, *(f"{n:.3f}" for n in numbers), len(scores)])


def plot(out: Path, made: Sequence[Line]) -> None:
    """perplexity.png: float, PTQ and QAT against bits a weight; recovered.png: shares with a dot for each seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    scored = [line for line in made if line.perplexities and line.row.kind != "float" and line.runs]
    if not scored:
        return
    figure, axes = plt.subplots(figsize=(9, 5.5))
    axes.axhline(scored[0].float_model, color="0.5", label="float")
    for line in (x for x in scored if x.loss == "kl" and "weight_bits" in x.runs[0]):
        bits, torchao = line.runs[0]["weight_bits"], line.row.kind == "torchao"
        if line.ptq is not None:
            axes.plot(bits, line.ptq, "x", color="tab:orange")
        score = mean(line.perplexities.values())
        axes.plot(bits, score, "s" if torchao else "o", color="tab:red" if torchao else "tab:blue")
        axes.annotate(line.row.name, (bits, score), fontsize=6, xytext=(3, 3), textcoords="offset points")
    for style, color, name in (("x", "tab:orange", "PTQ"), ("o", "tab:blue", "QAT"), ("s", "tab:red", "torchao's QAT")):
        axes.plot([], [], style, color=color, label=name)
    axes.set(xlabel="bits a weight", ylabel="word perplexity (log scale)", yscale="log")
    axes.legend()
    figure.tight_layout()
    figure.savefig(out / "perplexity.png", dpi=120)
    shares = [line for line in scored if line.recovered()]
    figure, axes = plt.subplots(figsize=(9, 1 + 0.22 * len(shares)))
    for i, line in enumerate(shares):
        values = [100 * share for share in line.recovered()]
        axes.barh(i, mean(values), color="tab:red" if line.row.kind == "torchao" else "tab:blue", alpha=0.5)
        axes.plot(values, [i] * len(values), "k.", markersize=4)
    axes.set_yticks(range(len(shares)), [f"{line.row.name}, {line.loss}" for line in shares], fontsize=7)
    axes.set(xlabel="recovered, % of PTQ's loss in log perplexity")
    axes.invert_yaxis()
    figure.tight_layout()
    figure.savefig(out / "recovered.png", dpi=120)
    plt.close("all")
