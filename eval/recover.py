"""How much of PTQ's loss does QAT win back on real text? The table of docs/evidence/results.md.

    python eval/recover.py --wikitext DIR --train-text wikitext2_train.txt.xz --out DIR \\
        --recipes nvfp4 mxfp4 int4-g32 --seeds 0 1 2

For each recipe the float model and its PTQ are scored once on WikiText-2's test pages; then every seed and loss ("kl"
to the float model, or "ce") fine-tunes the prepared model and scores what convert leaves. The float model fine-tuned by
cross entropy with the same budget is the control: what the training text alone is worth. Every conversion is verified
against its prepared model, and a difference is an error, not a row. `out/recover.csv` has a row a run, with device,
versions and date; the table printed last has mean and spread.
"""

import copy
import csv
import datetime
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from checkout import commit

import aoquant
from aoquant.integrations import job
from aoquant.integrations.finetune import finetune
from aoquant.integrations.lm_eval import Perplexity, evaluate
from aoquant.integrations.text import load_documents, token_blocks
from aoquant.recipes import get_recipe


@dataclass(frozen=True)
class Config:
    """Command line."""

    wikitext: str
    """A folder with WikiText-2 as test.jsonl, or "hub"."""
    train_text: tuple[Path, ...]
    out: Path
    recipes: tuple[str, ...] = ("nvfp4", "mxfp4", "int4-g32")
    seeds: tuple[int, ...] = (0, 1, 2)
    losses: tuple[str, ...] = ("kl",)
    model: str | None = None
    steps: int = 300
    batch_size: int = 32
    block: int = 512
    learning_rates: tuple[float, ...] = (3e-4,)
    limit: int | None = None
    dtype: str = "bfloat16"
    device: str = "cuda" if torch.cuda.is_available() else "cpu"


def main(c: Config) -> None:
    tokenizer, float_model = job.load_float(c.model, c.dtype, c.device)
    blocks = token_blocks([d for path in c.train_text for d in load_documents(path)], tokenizer, c.block)
    batch = {"input_ids": blocks[:8].to(c.device)}
    rows: list[dict[str, Any]] = []
    common = {
        "device": torch.cuda.get_device_name() if c.device == "cuda" else "CPU",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "aoquant": aoquant.__version__,
        "date": datetime.date.today().isoformat(),
        "commit": commit() or "unknown",
        "steps": c.steps,
        "tokens": c.steps * c.batch_size * c.block,
        "dtype": c.dtype,
    }

    def score(model: Any) -> Perplexity:
        return evaluate(model, tokenizer, wikitext=c.wikitext, limit=c.limit, progress=False)

    def record(began: float, p: Perplexity, **row: Any) -> None:
        facts = {"word_perplexity": p.word_perplexity, "window": p.window, "documents": p.documents}
        rows.append({**row, **facts, "seconds": round(time.perf_counter() - began, 1), **common})
        print({k: rows[-1][k] for k in (*row, "word_perplexity", "seconds")}, flush=True)
        c.out.mkdir(parents=True, exist_ok=True)
        with open(c.out / "recover.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(dict.fromkeys(k for r in rows for k in r)))
            writer.writeheader()
            writer.writerows(rows)

    def tune(model: Any, loss: str, lr: float, seed: int) -> None:
        teacher = float_model if loss == "kl" else None
        tuning: Any = {"steps": c.steps, "batch_size": c.batch_size, "learning_rate": lr, "seed": seed}
        finetune(model, blocks, loss=loss, teacher=teacher, label=f"{loss} {lr} {seed}", **tuning)

    began = time.perf_counter()
    base = score(float_model)
    record(began, base, stage="float", recipe="")
    for lr in c.learning_rates:
        began, tuned = time.perf_counter(), copy.deepcopy(float_model)
        tune(tuned, "ce", lr, c.seeds[0])
        record(began, score(tuned), stage="float, fine-tuned", recipe="", loss="ce", lr=lr, seed=c.seeds[0])
    for recipe in c.recipes:
        began, ptq_model = time.perf_counter(), copy.deepcopy(float_model)
        aoquant.quantize_(ptq_model, get_recipe(recipe).make())
        ptq = score(ptq_model)
        record(began, ptq, stage="PTQ", recipe=recipe)
        for loss in c.losses:
            for lr in c.learning_rates:
                for seed in c.seeds:
                    began, prepared = time.perf_counter(), copy.deepcopy(float_model)
                    aoquant.quantize_(prepared, aoquant.QATConfig(get_recipe(recipe).make(), step="prepare"))
                    tune(prepared, loss, lr, seed)
                    converted = copy.deepcopy(prepared)
                    aoquant.quantize_(converted, aoquant.QATConfig(step="convert"))
                    aoquant.verify(prepared, converted, batch)  # raises unless every layer is bit-equal
                    qat = score(converted)
                    share = job.recovered_share(base, ptq, qat)
                    record(
                        began,
                        qat,
                        stage="QAT",
                        recipe=recipe,
                        loss=loss,
                        lr=lr,
                        seed=seed,
                        recovered=share,
                        sqnr_db="inf",
                    )
    summarise(rows)


def summarise(rows: list[dict[str, Any]]) -> None:
    """Print one line for every (recipe, loss, learning rate): perplexities and recovered share over seeds."""
    for key in dict.fromkeys((r["recipe"], r["loss"], r["lr"]) for r in rows if r["stage"] == "QAT"):
        runs = [r for r in rows if r["stage"] == "QAT" and (r["recipe"], r["loss"], r["lr"]) == key]
        ptq = next(r["word_perplexity"] for r in rows if r["stage"] == "PTQ" and r["recipe"] == key[0])
        ppl, share = [r["word_perplexity"] for r in runs], [100 * r["recovered"] for r in runs]
        spread = statistics.stdev(share) if len(share) > 1 else 0.0
        print(
            f"{key[0]:12} {key[1]} lr {key[2]:g}: PTQ {ptq:.2f}, QAT {statistics.mean(ppl):.2f} ({min(ppl):.2f} to {max(ppl):.2f}), "
            f"recovered {statistics.mean(share):.0f} % +- {spread:.0f} over {len(runs)} seeds"
        )


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Config, description=__doc__))
