"""From the CSVs of public models to docs/evidence/real-models.md, and to the table of docs/kv-cache.md.

    python eval/real_models/publish.py

Reads benchmarks/results/real_gemma_first.csv and real_minilm.csv, which `python eval/real_models` wrote, and writes
what stands between the page's pairs of marks. The page on KV caches gets real_gemma_kv.csv and real_demo_kv.csv, where
these exist. Nothing is typed by hand, so that the pages have the numbers of the runs.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "eval")]

import pages  # noqa: E402

from aoquant.tools.markdown import table, wrapped  # noqa: E402
from real_models import rows  # noqa: E402

Line = dict[str, str]
TOKENS = "500000"
PERPLEXITY = "wikitext_word_perplexity"
PAGE, KV_PAGE = "docs/evidence/real-models.md", "docs/kv-cache.md"
KV_MODELS = {
    "gemma": "Gemma 3 270M (one key-value head of 256 values)",
    "demo": "The demo model (4.9 M parameters, two key-value heads of 64 values)",
}


def read(name: str, root: Path = ROOT) -> list[Line]:
    """Return the results of a committed CSV, without rows that failed."""
    with (root / "benchmarks" / "results" / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return [line for line in csv.DictReader(file) if not line["error"]]


def only(lines: Sequence[Line], **wanted: str) -> list[Line]:
    """Return the lines that have these values."""
    return [line for line in lines if all(line[name] == value for name, value in wanted.items())]


def average(lines: Sequence[Line], name: str) -> float:
    """Return the mean of a column."""
    return mean(float(line[name]) for line in lines)


def cell(lines: Sequence[Line], name: str, form: str = ".2f") -> str:
    """Return mean and standard deviation of a column over seeds; "" without lines."""
    if not lines:
        return ""
    values = [float(line[name]) for line in lines]
    return f"{mean(values):{form}}" + (f" ± {stdev(values):{form}}" if len(values) > 1 else "")


def quantised(lines: Sequence[Line], tokens: str = TOKENS) -> list[tuple[str, Line, list[Line]]]:
    """Return (recipe, PTQ, QAT over seeds) of each row of aoquant's, best first; those not trained on a budget last."""
    found = [
        (untrained["row"], untrained, only(lines, row=untrained["row"], stage="qat", served="", tokens=tokens))
        for untrained in only(lines, stage="ptq")
    ]
    return sorted(found, key=lambda row: (not row[2], average(row[2] or [row[1]], PERPLEXITY)))


def source(lines: Sequence[Line]) -> str:
    """Return the sentence that says what was measured, on what."""
    trained = only(lines, stage="qat", tokens=TOKENS)
    devices, torch, commits = (
        ", ".join(dict.fromkeys(line[name] for line in trained)) for name in ("device", "torch", "commit")
    )
    days = " to ".join(
        dict.fromkeys((min(line["date"] for line in trained)[:10], max(line["date"] for line in trained)[:10]))
    )
    return (
        "Word perplexity on WikiText-2's test pages by lm-eval's windows of 1024 tokens; QAT by distillation, "
        f"{int(TOKENS) / 1e6:g} M tokens, one seed. {devices}, PyTorch {torch}, commit {commits}, {days}."
    )


def all_rows(lines: Sequence[Line]) -> str:
    """Return the table of all recipes."""
    made = []
    for recipe, untrained, trained in quantised(lines):
        of_kl, top1, other = (cell(trained, f"{name}", form) for name, form in
                              (("wikitext_kl", ".3f"), ("wikitext_top1", ".3f"), ("other_word_perplexity", ".2f")))  # fmt: skip
        made.append((
            f"`{recipe}`", f"{float(untrained['bits']):.2f}", cell([untrained], PERPLEXITY), cell(trained, PERPLEXITY),
            cell([untrained], "wikitext_kl", ".3f"), of_kl, top1, cell([untrained], "other_word_perplexity"), other,
            ("yes" if all(line["equal"] == "True" for line in trained) else "no") if trained else "",
        ))  # fmt: skip
    heads = ("recipe", "bits", "PTQ", "QAT", "KL: PTQ", "KL: QAT", "top-1", "other text: PTQ", "QAT",
             "prepared == converted")  # fmt: skip
    return table(heads, made)


def floats(lines: Sequence[Line]) -> str:
    """Return the table of the float model, as it was and trained on the same tokens."""
    named = [("as it was", only(lines, stage="float"))]
    named += [(how, only(lines, row=name, stage="qat", tokens=TOKENS)) for name, how in
              (("float-ce", "fine-tuned by cross entropy"), ("float-kl", "distilled from itself"))]  # fmt: skip
    made = [(how, cell(of, PERPLEXITY), cell(of, "other_word_perplexity"), cell(of, "wikitext_kl", ".3f"))
            for how, of in named if of]  # fmt: skip
    return table(("float model", "WikiText-2", "other text", "KL"), made)


def exactness(lines: Sequence[Line]) -> str:
    """Return what moved between training and serving: aoquant's QAT beside torchao's on the same kernel."""
    made = []
    for recipe in dict.fromkeys(name for names in rows.SERVED.values() for name in names):
        for line in only(lines, stage="qat", tokens=TOKENS):
            ours = line["row"] == recipe and not line["served"]
            theirs = line["served"] == recipe
            if (ours or theirs) and only(lines, served=recipe, stage="qat"):
                trained, served = float(line[f"trained_{PERPLEXITY}"]), float(line[PERPLEXITY])
                drift = f"{100 * (served / trained - 1):+.2f} %" if line["equal"] != "True" else "0"
                made.append((f"`{recipe}`", "aoquant" if ours else "torchao", f"{trained:.2f}", f"{served:.2f}", drift))  # fmt: skip
    return table(("served as", "trained by", "as trained", "as served", "drift"), made)


def embeddings(lines: Sequence[Line]) -> str:
    """Return the table of the embedding model."""
    made = [
        (f"`{line['row']}`", f"{float(line['bits']):.2f}", f"{float(line['one_minus_cosine']):.4f}",
         f"{float(line['top10']):.3f}", f"{float(line['top1']):.3f}")
        for line in sorted(only(lines, stage="ptq"), key=lambda line: float(line["one_minus_cosine"]))
    ]  # fmt: skip
    return table(("recipe, PTQ", "bits", "1 - cosine", "top-10", "nearest"), made)


def kv_caches(root: Path = ROOT) -> str:
    """Return the tables of KV formats, for each model that was measured."""
    made = []
    for model, about in KV_MODELS.items():
        if (root / "benchmarks" / "results" / f"real_{model}_kv.csv").exists():
            made += [*kv_table(about, read(f"real_{model}_kv", root))]
    return "\n\n".join(made)


def kv_table(about: str, lines: Sequence[Line]) -> tuple[str, str]:
    """Return one model's table, and what was measured. The float model's perplexity is the first row."""
    (plain,) = only(lines, stage="float")
    found = [("high precision", "16.00", cell([plain], PERPLEXITY), "", "0.0000", "", "")]
    for line in sorted(only(lines, stage="ptq"), key=lambda line: float(line["wikitext_kl"])):
        of = only(lines, row=line["row"], stage="qat")
        name = line["row"].removeprefix("kv-")
        equal = ("yes" if all(t["equal"] == "True" for t in of) else "no") if of else ""
        found.append((
            f"`{name.removesuffix('-query')}`{', queries too' if name.endswith('-query') else ''}",
            f"{float(line['bits']):.2f}", cell([line], PERPLEXITY), cell(of, PERPLEXITY),
            cell([line], "wikitext_kl", ".4f"), cell(of, "wikitext_kl", ".4f"), equal,
        ))  # fmt: skip
    heads = ("format", "bits", "PTQ", "QAT", "KL: PTQ", "KL: QAT", "prepared == converted")
    trained = only(lines, stage="qat")
    tokens, seeds = ({line[name] for line in trained} for name in ("tokens", "seed"))
    device, torch, commit, date = (plain[name] for name in ("device", "torch", "commit", "date"))
    budget = (
        f"QAT by distillation, {'/'.join(sorted(tokens))} tokens, {len(seeds)} seed(s), ± over seeds. "
        if trained
        else ""
    )
    said = (
        f"{about}; layers stay in bfloat16. Word perplexity on WikiText-2's test pages, KL to the float model in nats a "
        f"token. {budget}{device}, PyTorch {torch}, commit {commit}, {date[:10]}, `{plain['command']}`."
    )
    return table(heads, found), wrapped(said)


def publish(root: Path = ROOT) -> None:
    """Write the pages."""
    pages.between(root / KV_PAGE, "measured", kv_caches(root))
    for name, made in contents(read("real_gemma_first", root), read("real_minilm", root)).items():
        pages.between(root / PAGE, name, made)


def contents(gemma: Sequence[Line], minilm: Sequence[Line]) -> dict[str, Any]:
    """Return what stands between the marks of docs/evidence/real-models.md."""
    return {
        "rows": f"{all_rows(gemma)}\n\n{wrapped(source(gemma))}",
        "floats": floats(gemma),
        "exactness": exactness(gemma),
        "embeddings": embeddings(minilm),
    }


if __name__ == "__main__":
    publish()
