"""The result of a run: its stages, its verdicts, and the files that it leaves."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from aoquant._messages import folded
from aoquant.integrations.job.records import RESULTS, write_json
from aoquant.integrations.lm_eval import METRICS, Perplexity
from aoquant.report import Report, render
from aoquant.serving import command

QUANTISATION_ERROR = "float_against_quantized"  # folder of the report of float against quantised
PICTURE = "perplexity.png"


@dataclass(frozen=True)
class Stage:
    """Hold one row of the table. note: how it was run, when not as it is deployed.

    seconds: since the stage before. peak_bytes: the most memory that rank 0 held on its GPU meanwhile; 0 on a CPU.
    tokens_per_s: of all ranks in training, median of the steps; 0 where nothing was trained in this process.
    """

    name: str
    perplexity: Perplexity
    bytes: int
    note: str = ""
    seconds: float = 0.0
    peak_bytes: int = 0
    tokens_per_s: float = 0.0

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "Stage":
        """Return the stage that `asdict` and JSON made of one."""
        lists: Any = {k: tuple(v) if isinstance(v, list) else v for k, v in found["perplexity"].items()}
        return cls(**{**found, "perplexity": Perplexity(**lists)})


@dataclass(frozen=True)
class Result:
    """The result of a run. min_sqnr_db, rows: of prepared against converted. skipped: why layers are left out, by name.

    exported: the folder or file for an engine.

    coverage: the share of parameters in quantised layers, a sentence. stay_float: matrices that stay in high precision,
        and why. trained_on: the budget and the files of the fine-tunes, in words.
    """

    recipe: str
    out: Path
    stages: list[Stage]
    recovered: str
    min_sqnr_db: float
    rows: int
    reload: str
    coverage: str
    stay_float: str
    trained_on: str
    skipped: Mapping[str, str] = field(default_factory=dict)
    exported: Path | None = None
    finish_seconds: float = 0.0
    finish_peak_bytes: int = 0

    def sqnr(self) -> str:
        """Return the verdict over all layers, for people."""
        if math.isnan(self.min_sqnr_db):
            return "not run here, the kernel is missing"
        return f"minimum SQNR {self.min_sqnr_db} dB over {self.rows} rows"

    def table(self) -> str:
        """Return the stages as a markdown table, then the verdicts."""
        from tabulate import tabulate

        rows = [(s.name, *(getattr(s.perplexity, m) for m in METRICS), s.bytes / 1e6, s.note) for s in self.stages]
        heads = ("model", "word perplexity", "byte perplexity", "bits/byte", "size MB", "note")
        first = self.stages[0].perplexity
        left = [f"left out: {reason}" for reason in folded(self.skipped.values())]
        return "\n".join(
            (
                tabulate(rows, heads, tablefmt="github", floatfmt=("", ".3f", ".4f", ".4f", ".2f", "")),
                "",
                f"recipe {self.recipe}; trained on {self.trained_on}",
                f"scored on {first.documents} documents of {first.source}; {first.windows}",
                self.coverage,
                f"stay in high precision: {self.stay_float or 'biases, norms and scales alone'}",
                *left,
                f"recovered by QAT: {self.recovered}",
                f"prepared against converted: {self.sqnr()}",
                f"checkpoint reloaded: {self.reload}",
            )
        )

    def costs(self) -> str:
        """Return time and memory of each stage as a markdown table."""
        from tabulate import tabulate

        rows = [(s.name, s.seconds, s.peak_bytes / 1e9 or None, s.tokens_per_s or None) for s in self.stages]
        rows.append(("checkpoint and report", self.finish_seconds, self.finish_peak_bytes / 1e9 or None, None))
        heads = ("stage", "seconds", "peak GB of a GPU", "tokens/s in training")
        return tabulate(rows, heads, tablefmt="github", floatfmt=("", ".1f", ".2f", ".0f"))

    def where_to_look(self, layout: str | None, refusal: str = "") -> str:
        """Return the files that a run left, which of them to open first, and what to do next.

        layout: in which the user's own model is exported; None for the model that comes with the package. refusal: why
        it would not be, "" where it would.
        """
        out, then = self.out, ""
        if layout is None:
            then = f", or another model:\n  aoquant run --model FOLDER --recipe {self.recipe} --train-text FILE"
            then += " --wikitext FOLDER --out OUT"
        elif refusal:
            then = f"\nit is not ready for an engine: {refusal}"
        elif self.exported is None:
            then = f"; to serve it:\n  aoquant export {out}/checkpoint --format {layout} --out served"
        return (
            (f"written for the engine: {command(self.exported)}\n" if self.exported else "")
            + f"written to {out}/: {PICTURE} (the table's), report.md (all of this), {RESULTS}, checkpoint/\n"
            f"what quantisation costs each layer: {out}/{QUANTISATION_ERROR}/report.png\n"
            f"next: aoquant eval {out}/checkpoint{then}"
        )

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "Result":
        """Return the result in a finished run's `aoquant_run.json`."""
        numbers: dict[str, Any] = {name: found[name] for name in _RECORDED if name in found}
        numbers["stages"] = [Stage.from_json(s) for s in found["stages"]]
        numbers["min_sqnr_db"] = float(found["min_sqnr_db"])
        return cls(recipe=found["options"]["recipe"], out=Path(found["options"]["out"]), **numbers)


# fields in `aoquant_run.json`; recipe and out are among its options
_RECORDED = [f.name for f in fields(Result) if f.name not in ("recipe", "out", "exported")]


def write(result: Result, layers: Report, error: Report, record: Mapping[str, Any]) -> None:
    """Write a run's files. layers: prepared against converted. error: float against quantised. record: for RESULTS."""
    out = result.out
    layers.save(out)
    error.save(out / QUANTISATION_ERROR)
    names, scores = zip(*((s.name, s.perplexity.word_perplexity) for s in result.stages), strict=True)
    title = f"{result.recipe}; prepared against converted: {result.sqnr()}"
    render.ladder(names, scores, "word perplexity", title, out / PICTURE)
    text = f"# aoquant run: {result.recipe}\n\n{result.table()}\n\n## Time and memory\n\n{result.costs()}\n\n"
    text += "## Prepared against converted\n\n"
    text += f"{layers.to_markdown()}\n\n## Float against quantised\n\n{error.to_markdown()}\n"
    (out / "report.md").write_text(text, encoding="utf-8")
    numbers = {name: value for name, value in asdict(result).items() if name in _RECORDED}
    numbers = {**record, **numbers, "min_sqnr_db": str(result.min_sqnr_db)}
    for folder in (out / "checkpoint", out):  # in `out` last: its presence says that the run is complete
        write_json(folder / RESULTS, numbers)


def recovered(base: Perplexity, ptq: Perplexity, qat: Perplexity) -> str:
    """The share of PTQ's loss that QAT won back, as text; n/a where PTQ lost nothing that can be told from noise.

    Differences are paired over documents, and count beyond two standard errors.
    """
    if len(base.words) < 2:
        return "n/a (one document shows no noise to compare with)"
    loss, noise = _paired(base, ptq)
    size = f"{abs(loss):.4f} +- {noise:.4f} nats a word"
    if abs(loss) <= 2 * noise:
        return f"n/a (PTQ {'loses' if loss > 0 else 'gains'} {size}, which is within noise)"
    if loss < 0:
        return f"n/a (PTQ gains {size}: it scores better than float, so there is no loss to win back)"
    gain, gain_noise = _paired(qat, ptq)
    change = f"{abs(gain):.4f} +- {gain_noise:.4f}"
    if abs(gain) <= 2 * gain_noise:
        return f"nothing beyond noise (PTQ loses {size}; QAT {'wins back' if gain > 0 else 'loses another'} {change})"
    if gain < 0:
        return f"nothing (PTQ loses {size}, and QAT loses another {change})"
    share = recovered_share(base, ptq, qat)
    more = "; it scores better than float: compare with the float model fine-tuned on the same text" * (share > 1)
    return f"{100 * share:.0f} % of PTQ's loss ({size}{more})"


def _paired(better: Perplexity, worse: Perplexity) -> tuple[float, float]:
    """(loss of `worse` against `better`, its standard error) in nats a word, paired over documents."""
    words = sum(better.words)
    pairs = [a - b for a, b in zip(better.loglikelihoods, worse.loglikelihoods, strict=True)]
    mean = sum(pairs) / len(pairs)
    variance = sum((p - mean) ** 2 for p in pairs) / (len(pairs) - 1)
    return sum(pairs) / words, math.sqrt(len(pairs) * variance) / words


def recovered_share(base: Perplexity, ptq: Perplexity, qat: Perplexity) -> float:
    """(PTQ - QAT) / (PTQ - float) in log perplexity: 1 when QAT equals float, above 1 when it is better."""
    lost, gained = sum(base.loglikelihoods), sum(qat.loglikelihoods)
    floor = sum(ptq.loglikelihoods)
    return (gained - floor) / (lost - floor)
