"""The two plots of a table: perplexity.png, against bits a weight, and recovered.png, a bar for each row and loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from experiments.table import Line


def plot(out: Path, made: Sequence[Line], losses: Mapping[str, str]) -> None:
    """perplexity.png: float, PTQ and QAT against bits a weight; recovered.png: shares with a dot for each seed.

    losses: the one that pages show, by row.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    scored = [line for line in made if line.runs and line.row.kind != "float"]
    if not scored:
        return
    figure, axes = plt.subplots(figsize=(9, 5.5))
    axes.axhline(scored[0].float_model, color="0.5", label="float")
    for line in scored:
        bits, torchao = line.runs[max(line.runs)].get("weight_bits"), line.row.kind == "torchao"
        if bits is None or losses[line.row.name] != line.loss:
            continue
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
