"""From the CSVs of public models to the pages that show them.

    python eval/real_models/publish.py

    benchmarks/results/real_gemma.csv, real_minilm.csv      read: what `python eval/real_models` wrote
    benchmarks/results/real_gemma_tasks.csv                 read: the same with two tasks of lm-eval, one seed
    benchmarks/results/real_gemma_rates.csv                 read: other learning rates, scored on validation pages
    benchmarks/results/real_demo_gptq.csv                   read: QAT of the demo model from calibrated PTQ
    benchmarks/results/real_gemma_kv.csv, real_demo_kv.csv  read where these exist: KV caches
    aoquant/tools/measured.csv                              `aoquant recipes --for`, and docs/choosing.md's table
    README.md, docs/evidence/real-models.md                 between pairs of marks; docs/kv-cache.md, too

A table is of one budget, `TOKENS`, unless it says otherwise. Nothing is typed by hand, so that a page has the numbers
of the runs.
"""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "eval")]

import pages  # noqa: E402

from aoquant.tools import choosing  # noqa: E402
from aoquant.tools.markdown import table, wrapped  # noqa: E402
from real_models import rows  # noqa: E402
from real_models.tasks import ANSWER  # noqa: E402

Line = dict[str, str]
TOKENS = "500000"
PERPLEXITY = "wikitext_word_perplexity"
HEADLINES = ("int4-g128", "vllm-w4a16-g128", "gguf-q4_0", "nvfp4", "mxfp4")
PEER = "vllm-w4a16-g128"  # which has the format of `rows.PEERS`
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
    form = form if abs(mean(values)) < 1e6 else ".2g"
    return f"{mean(values):{form}}" + (f" ± {stdev(values):{form}}" if len(values) > 1 else "")


def recovered(float_model: float, ptq: float, qat: float) -> float:
    """Return the share of PTQ's loss that QAT wins back, (PTQ - QAT) / (PTQ - float) in log perplexity."""
    return math.log(ptq / qat) / math.log(ptq / float_model)


def quantised(lines: Sequence[Line], tokens: str = TOKENS) -> list[tuple[str, Line, list[Line]]]:
    """Return (recipe, PTQ, QAT over seeds) of each row of aoquant's, best first; those not trained on a budget last."""
    found = [
        (untrained["row"], untrained, only(lines, row=untrained["row"], stage="qat", served="", tokens=tokens))
        for untrained in only(lines, stage="ptq")
        if untrained["row"] not in rows.PEERS
    ]
    return sorted(found, key=lambda row: (not row[2], average(row[2] or [row[1]], PERPLEXITY)))


def source(lines: Sequence[Line], tokens: str = TOKENS) -> str:
    """Return the sentence that says what was measured, on what."""
    trained = only(lines, stage="qat", tokens=tokens)
    devices = ", ".join(dict.fromkeys(line["device"] for line in trained))
    days = sorted({line["date"][:10] for line in trained})
    seeds = sorted({len(row[2]) for row in quantised(lines, tokens) if row[2]})
    return (
        "Word perplexity on WikiText-2's test pages, windows of 1024 tokens after BOS, of Gemma 3 270M, rounded once "
        f"before (Q4_K_M); QAT by distillation, {int(tokens) / 1e6:g} M tokens, "
        f"{' to '.join(map(str, dict.fromkeys((seeds[0], seeds[-1]))))} seed{'s' * (seeds[-1] > 1)}. "
        f"{devices}, {' to '.join(dict.fromkeys((days[0], days[-1])))}."
    )


def measured(lines: Sequence[Line]) -> str:
    """Return aoquant/tools/measured.csv."""
    base = average(only(lines, stage="float"), PERPLEXITY)
    made = [f"# {source(lines)}", "recipe,bits,float,ptq,qat,seeds"]
    for recipe, untrained, trained in quantised(lines):
        numbers = (f"{float(n):.3f}" for n in (untrained["bits"], base, untrained[PERPLEXITY]))
        qat = f"{average(trained, PERPLEXITY):.3f}" if trained else ""
        if recipe not in {*rows.MXFP4, *rows.MIXED} and not {"+", "@"} & set(recipe):
            made.append(",".join([recipe, *numbers, qat, str(len(trained))]))
    return "\n".join(made) + "\n"


def readme(lines: Sequence[Line]) -> str:
    """Return the README's table."""
    base = cell(only(lines, stage="float"), PERPLEXITY)
    of = {recipe: (untrained, trained) for recipe, untrained, trained in quantised(lines)}
    shown = [
        (f"`{name}`", base, cell([of[name][0]], PERPLEXITY), *_trained_and_served(of[name][1]))
        for name in HEADLINES
        if name in of and of[name][1]
    ]
    return table(("recipe", "float", "PTQ", "QAT as trained", "QAT as served"), shown)


def _trained_and_served(trained: Sequence[Line]) -> tuple[str, str]:
    return cell(trained, f"trained_{PERPLEXITY}"), cell(trained, PERPLEXITY)


def all_rows(lines: Sequence[Line]) -> str:
    """Return the table of all recipes, without calibrated starts."""
    base = average(only(lines, stage="float"), PERPLEXITY)
    made = []
    for recipe, untrained, trained in quantised([line for line in lines if "+" not in line["row"]]):
        lost = float(untrained[PERPLEXITY]) > 1.01 * base
        share = (
            recovered(base, float(untrained[PERPLEXITY]), average(trained, PERPLEXITY)) if trained and lost else None
        )
        of_kl, top1, other = (cell(trained, f"{name}", form) for name, form in
                              (("wikitext_kl", ".3f"), ("wikitext_top1", ".3f"), ("other_word_perplexity", ".2f")))  # fmt: skip
        made.append((
            f"`{recipe}`", f"{float(untrained['bits']):.2f}", cell([untrained], PERPLEXITY), cell(trained, PERPLEXITY),
            "" if share is None else f"{100 * share:.0f}",
            cell([untrained], "wikitext_kl", ".3f"), of_kl, top1, cell([untrained], "other_word_perplexity"), other,
            ("yes" if all(line["equal"] == "True" for line in trained) else "no") if trained else "",
        ))  # fmt: skip
    heads = ("recipe", "bits", "PTQ", "QAT", "recovered, %", "KL: PTQ", "KL: QAT", "top-1", "other text: PTQ", "QAT",
             "prepared == converted")  # fmt: skip
    return table(heads, made)


def starts(lines: Sequence[Line]) -> str:
    """Return the table of QAT that starts from a calibrated PTQ, beside QAT that starts from the float weights."""
    of = {recipe: (untrained, trained) for recipe, untrained, trained in quantised(lines)}
    scores = ((PERPLEXITY, ".2f"), ("wikitext_kl", ".3f"), ("other_word_perplexity", ".2f"))
    made = []
    methods: dict[str, dict[str, tuple[Line, list[Line]]]] = {}
    for name in sorted(name for name in of if "+" in name and of[name][1]):
        recipe, _, method = name.partition("+")
        methods.setdefault(recipe, {"float weights": of[recipe]})[method] = of[name]
    for recipe, ways in methods.items():
        for how, (untrained, trained) in ways.items():
            cells = [cell(at, score, form) for score, form in scores for at in ([untrained], trained)]
            made.append((f"`{recipe}`", how, str(len(trained)), *cells))
    heads = ("recipe", "start", "seeds", "PTQ", "QAT", "KL: PTQ", "KL: QAT", "other text: PTQ", "QAT")
    return table(heads, made)


def budgets(lines: Sequence[Line]) -> str:
    """Return the table of recipes that were trained on another budget than that of `all_rows`, or at several rates."""
    base, made = average(only(lines, stage="float"), PERPLEXITY), []
    rounded = {recipe: float(untrained[PERPLEXITY]) for recipe, untrained, _ in quantised(lines)}
    for recipe in rounded:
        of = only(lines, row=recipe, stage="qat", served="")
        runs = sorted({(int(line["tokens"]), line["rate"]) for line in of})
        for tokens, rate in runs if len(runs) > 1 or any(str(tokens) != TOKENS for tokens, _ in runs) else ():
            at = only(of, tokens=str(tokens), rate=rate)
            # of what rounding to the nearest loses, also where a calibrated PTQ lost less
            share = recovered(base, rounded[recipe.partition("+")[0]], average(at, PERPLEXITY))
            scores = (
                (PERPLEXITY, ".2f"),
                ("wikitext_kl", ".3f"),
                ("wikitext_top1", ".3f"),
                ("other_word_perplexity", ".2f"),
            )
            cells = [cell(at, name, form) for name, form in scores]
            cells.insert(1, f"{100 * share:.0f}")
            made.append((f"`{recipe}`", f"{tokens / 1e6:g} M", rate, str(len(at)), *cells))
    return table(("recipe", "tokens", "rate", "seeds", "QAT", "recovered, %", "KL", "top-1", "other text"), made)


def rates(lines: Sequence[Line], searched: Sequence[Line]) -> str:
    """Return the table of learning rates, by the KL on validation pages. searched: lines that have no other scores."""
    of = [line for line in (*lines, *searched) if line["tokens"] == "2000000" and line["validation_kl"]]
    of.sort(key=lambda line: (line["row"], float(line["rate"]), line["seed"]))
    made = [(f"`{line['row']}`", line["rate"], line["seed"], pages_of(line["command"], "validation"),
             cell([line], "validation_kl", ".4f")) for line in of]  # fmt: skip
    return table(("recipe", "rate", "seed", "scored on", "KL"), made)


def floats(lines: Sequence[Line]) -> str:
    """Return the table of the float model, as it was and trained on the same tokens."""
    named = [("as it was", only(lines, stage="float"))]
    named += [(how, only(lines, row=name, stage="qat", tokens=TOKENS)) for name, how in
              (("float-ce", "fine-tuned by cross entropy"), ("float-kl", "distilled from itself"))]  # fmt: skip
    made = [(how, cell(of, PERPLEXITY), cell(of, "other_word_perplexity"), cell(of, "wikitext_kl", ".3f"))
            for how, of in named if of]  # fmt: skip
    return table(("float model", "WikiText-2", "other text", "KL"), made)


def exactness(lines: Sequence[Line]) -> str:
    """Return what moved between training and serving, over seeds: aoquant's QAT beside torchao's on the same kernel."""
    twins, of = {name for served in rows.SERVED.values() for name in served}, dict[tuple[str, str], list[Line]]()
    for line in only(lines, stage="qat", tokens=TOKENS):
        if line["served"] or line["row"] in twins or line["prompts"]:
            of.setdefault((line["row"], line["served"]), []).append(line)
    made = []
    for (row, by), seeds in sorted(of.items(), key=lambda item: item[0][0]):
        trained, served = _trained_and_served(seeds)
        moved = max((100 * (float(s[PERPLEXITY]) / float(s[f"trained_{PERPLEXITY}"]) - 1) for s in seeds), key=abs)
        exact = all(line["equal"] == "True" for line in seeds)
        drift = "0" if exact else f"{moved:+{'.4f' if abs(moved) < 1e6 else '.2g'}} %"
        changed = ", ".join(f"{line['prompts_changed']} of {line['prompts']}" for line in seeds if line["prompts"])
        kernel = "torchao's layer" if by == "torchao" else f"`{by or row}`"
        made.append(
            (kernel, f"`{row}`", str(len(seeds)), trained, served, drift, cell(seeds, "wikitext_kl", ".4f"), changed)
        )
    heads = ("served as", "trained as", "seeds", "as trained", "as served", "largest drift", "KL",
             "greedy answers that change")  # fmt: skip
    return table(heads, made)


def beside(lines: Sequence[Line]) -> str:
    """Return the table of aoquant's PTQ beside other tools', in one format."""
    ours = {PEER: ("aoquant", "nearest"), f"{PEER}+gptq": ("aoquant", "gptq")}
    named = ours | {name: tuple(name.rsplit("-", 1)) for name in rows.PEERS}
    scores = {PERPLEXITY: ".2f", "wikitext_kl": ".3f", "wikitext_top1": ".3f", "other_word_perplexity": ".2f"}
    found = [(name, only(lines, row=name, stage="ptq")) for name in named]
    made = [(*named[name], *(cell(of, score, form) for score, form in scores.items())) for name, of in found if of]
    return table(("tool", "method", "perplexity", "KL", "top-1", "other text"), made)


def tasks(lines: Sequence[Line]) -> str:
    """Return the table of lm-eval's tasks; rows that were not scored on them are left out."""
    scored = [line for line in lines if line.get("ruler_fwe")]
    named = [("float", only(scored, stage="float"), [])]
    named += [(f"`{name}`", [untrained], trained) for name, untrained, trained in quantised(scored)]
    made = [(how, *(cell(of, task) for task in ANSWER for of in (ptq, qat))) for how, ptq, qat in named]
    heads = ["model", *(head for task in ANSWER for head in (f"`{task}`: PTQ", "QAT"))]
    return table(heads, made)


def embeddings(lines: Sequence[Line]) -> str:
    """Return the table of the embedding model, those that were trained first."""
    scores = {"one_minus_cosine": ".4f", "top10": ".3f", "top1": ".3f"}
    found = []
    for line in only(lines, stage="ptq"):
        trained = only(lines, row=line["row"], stage="qat", served="")
        found += [(line, rate, only(trained, rate=rate)) for rate in sorted({t["rate"] for t in trained}) or [""]]
    found.sort(key=lambda row: (not row[2], average(row[2] or [row[0]], "one_minus_cosine")))
    made = [
        (f"`{line['row']}`", f"{float(line['bits']):.2f}", rate,
         *(cell(of, name, form) for name, form in scores.items() for of in ([line], trained)),
         ("yes" if all(t["equal"] == "True" for t in trained) else "no") if trained else "")
        for line, rate, trained in found
    ]  # fmt: skip
    heads = (
        "recipe",
        "bits",
        "rate",
        "1 - cosine: PTQ",
        "QAT",
        "top-10: PTQ",
        "QAT",
        "nearest: PTQ",
        "QAT",
        "prepared == converted",
    )
    return table(heads, made)


def kv_caches(root: Path = ROOT) -> str:
    """Return the tables of KV formats, for each model that was measured."""
    made = []
    for model, about in KV_MODELS.items():
        if (root / "benchmarks" / "results" / f"real_{model}_kv.csv").exists():
            made += kv_table(about, read(f"real_{model}_kv", root), f"real_{model}_kv.csv")
    return "\n\n".join(made)


def kv_table(about: str, lines: Sequence[Line], file: str) -> list[str]:
    """Return one model's tables, caches alone and with layers, and what was measured. The float model comes first."""
    (plain,) = only(lines, stage="float")
    ptq = sorted(only(lines, stage="ptq"), key=lambda line: float(line["wikitext_kl"]))
    alone = [line for line in ptq if line["row"].startswith("kv-")]
    heads = ("rate", "PTQ", "QAT", "KL: PTQ", "KL: QAT", "prepared == converted")
    base = ("", cell([plain], PERPLEXITY), "", "0.0000", "", "")
    found = [("high precision", "16.00", *base)]
    found += [(cache_of(line), f"{float(line['bits']):.2f}", *kv_scores(line, lines)) for line in alone]
    made = [table(("cache", "bits", *heads), found)]
    if len(alone) < len(ptq):
        found = [("bfloat16", "high precision", *base)]
        for line in ptq:
            if line not in alone:
                found.append((f"`{line['row'].partition('-kv-')[0]}`", cache_of(line), *kv_scores(line, lines)))
        made.append(table(("layers", "cache", *heads), found))
    trained = only(lines, stage="qat")
    tokens, seeds = (sorted({line[name] for line in trained}) for name in ("tokens", "seed"))
    device, torch, date = (plain[name] for name in ("device", "torch", "date"))
    budget = (
        f"QAT by distillation, {'/'.join(tokens)} tokens, rates that were not searched"
        f"{f'; ± is the standard deviation over up to {len(seeds)} seeds, which order the text' * (len(seeds) > 1)}. "
    )
    said = (
        f"{about}. Word perplexity on {pages_of(plain['command'])} of WikiText-2, KL to the float model in nats a token. "
        f"{budget if trained else 'Nothing was trained. '}"
        f"{device}, PyTorch {torch}, {date[:10]}; each line of [{file}](../benchmarks/results/{file}) has its command and commit."
    )
    return [*made, wrapped(said)]


def cache_of(line: Line) -> str:
    """Return what the cache of a row is, for a table."""
    _, kv, name = line["row"].rpartition("kv-")
    return f"`{name.removesuffix('-query')}`{', queries too' * name.endswith('-query')}" if kv else "high precision"


def kv_scores(untrained: Line, lines: Sequence[Line]) -> tuple[str, ...]:
    """Return the scores of a row before and after training, over seeds."""
    of = only(lines, row=untrained["row"], stage="qat")
    return (
        "/".join(dict.fromkeys(line["rate"] for line in of)), cell([untrained], PERPLEXITY), cell(of, PERPLEXITY),
        cell([untrained], "wikitext_kl", ".4f"),
        cell(of, "wikitext_kl", ".4f"), ("yes" if all(line["equal"] == "True" for line in of) else "no") if of else "",
    )  # fmt: skip


def pages_of(command: str, of: str = "test") -> str:
    """Return which pages of a kind a command scored."""
    words = command.split()
    return f"the first {words[words.index('--pages') + 1]} {of} pages" if "--pages" in words else f"the {of} pages"


def publish(root: Path = ROOT) -> None:
    """Write all pages."""
    names = ("real_gemma", "real_gemma_tasks", "real_gemma_rates", "real_minilm", "real_demo_gptq")
    gemma, scored, searched, minilm, demo = (read(name, root) for name in names)
    (root / "aoquant" / "tools" / "measured.csv").write_text(measured(gemma), encoding="utf-8")
    choosing.measured.cache_clear()
    page = root / "docs" / "choosing.md"
    text = page.read_text(encoding="utf-8").split("\n")
    first = text.index(next(line for line in text if line.startswith(f"| {choosing.HEADS[0]} |")))
    numbers = choosing.measured(root / "aoquant" / "tools" / "measured.csv")
    text[first : text.index("", first)] = choosing.markdown(numbers).split("\n")
    page.write_text("\n".join(text), encoding="utf-8")
    pages.between(root / "README.md", "real models", f"{readme(gemma)}\n\n{wrapped(source(gemma))}")
    pages.between(root / KV_PAGE, "measured", kv_caches(root))
    for name, made in contents(gemma, scored, searched, minilm, demo).items():
        pages.between(root / PAGE, name, made)


def contents(
    gemma: Sequence[Line],
    scored: Sequence[Line],
    searched: Sequence[Line],
    minilm: Sequence[Line],
    demo: Sequence[Line],
) -> dict[str, Any]:
    """Return what stands between the marks of docs/evidence/real-models.md. scored: rows with tasks; of calibrated
    starts the first seeds are there. searched: other learning rates.
    """
    return {
        "rows": f"{all_rows(gemma)}\n\n{wrapped(source(gemma))}",
        "floats": floats(gemma),
        "exactness": exactness(gemma),
        "other tools": beside(gemma),
        "budgets": budgets(gemma),
        "rates": rates(gemma, searched),
        "starts": starts([*gemma, *(line for line in scored if "+" in line["row"])]),
        "tasks": tasks(scored),
        "starts of the demo model": starts(demo),
        "embeddings": embeddings(minilm),
    }


if __name__ == "__main__":
    publish()
