"""Pretrain a small Llama or Mixtral from text files: the float model that the demos and evaluations quantise, or a
quantised one from scratch.

    python eval/pretrain.py --text mix.txt.xz --anneal wikitext2_train.txt.xz --out demo --steps 10000
    python eval/pretrain.py --text mix.txt.xz --out demo-moe --arch moe --seconds 400 --graph --compile
    torchrun --nproc-per-node 2 eval/pretrain.py --text mix.txt.xz --out demo-2 --seconds 400
    python eval/pretrain.py --text mix.txt.xz --out demo-quartet2 --recipe quartet2

The tokenizer is trained on the text, which is encoded once (`encoded.py`). The model's embeddings are tied; every
linear layer contracts over `hidden` or `intermediate`, both multiples of 128, so that the groups of every block format
(16, 32, 128) divide them (`pretrain_model.py`). It is trained by AdamW on random windows, with float32 weights under
bf16 autocast on a GPU (`pretrain_loop.py`). A run that stops and resumes ends as one that did not, with the same number
of GPUs: bit for bit on a CPU, and with `--deterministic` on a GPU, where tests compare losses within a bound.

`--seconds 400` takes as many steps as fit into so much time; `--limit 500` stops with a checkpoint when the run has
taken so long, for `--resume`. Several runs may share a GPU, and a `--corpus` folder.

With `--recipe` every linear layer but the head is prepared for that recipe of `aoquant recipes` before the first step,
so that forward is the deployed layer's from the beginning, and so is backward quantised where the recipe says how
("quartet", "quartet2"); `--backward` sets another one. Layers draw their numbers from a state that is part of the
checkpoint. `accumulate` splits a batch into micro-batches. `--graph` makes a step one CUDA graph, several times as fast
at this size (see `graphed.py`).

Learning rate: warm-up, then "wsd" (flat, then linear to zero; Hu et al., arXiv:2404.06395) or "cosine" to zero. A
decay fraction of 1 is the linear-to-zero schedule (Bergsma et al., arXiv:2502.15938). In the last `anneal_fraction`
of the steps a share of every batch comes from the anneal text: text near to the target helps most while the rate
falls.

`out` receives `model/` (bf16 safetensors of the high-precision weights, in files of at most `shard_mb`, config,
tokenizer), `checkpoint.pt` (f32 weights, optimizer, RNG, step), `train_log.json`, `loss.csv`, and `validation.jsonl`, a
line for every `validate_every` steps. Validation is bits per byte over consecutive windows, a harder measure than
lm-eval's only in that pages are not aligned to windows.
"""

from __future__ import annotations

import csv
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from corpus import Corpus, Sources
from data_parallel import Ranks
from encoded import encoded
from pretrain_config import Config
from pretrain_loop import batch_at, lr_at, train, validate
from pretrain_model import Model, build_model
from provenance import plain, provenance, sha256

from aoquant import unprepare

__all__ = ["Config", "batch_at", "build_model", "lr_at", "main", "train", "validate"]


def main(config: Config) -> None:
    began = time.perf_counter()
    ranks = Ranks(config.device)
    config.out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    if config.deterministic:
        torch.use_deterministic_algorithms(True)
    # A resumed run reads the tokenizer that its first half wrote.
    tokenizer = config.out / "model" if config.resume else config.tokenizer
    files = (config.text, config.anneal, config.validation)
    sources = Sources(*files, tokenizer, config.tokenizer_bytes, config.vocab, config.window)
    data, facts = encoded(sources, config.held_out, config.corpus or config.out / "corpus", config.device)
    prepared = time.perf_counter() - began
    model = build_model(config)
    result = train(config, data, model, began)
    if ranks.first:
        write(config, model, data, result, {**facts, "prepare_seconds": round(prepared, 1)}, began)
    ranks.wait()  # a rank that resumes reads what the first one writes


def write(
    config: Config, model: Model, data: Corpus, result: dict[str, Any], facts: dict[str, Any], began: float
) -> None:
    """Model, tokenizer, log and curve."""
    data.tokenizer.save_pretrained(config.out / "model")
    if config.recipe != "bf16":
        unprepare(model)
    files_written = save_model(model, config.out / "model", config.shard_mb)
    save_curve(result.pop("curve"), config.out / "loss.csv")
    log = {
        **provenance(config.device),
        "config": plain(asdict(config)) | {"steps": result["steps"]},
        "parameters": sum(p.numel() for p in model.parameters()),
        "model_bytes": sum(file.stat().st_size for file in files_written),
        "model_sha256": {file.name: sha256(file) for file in files_written},
        **facts,
        "all_seconds": round(time.perf_counter() - began, 1),
        **result,
    }
    (config.out / "train_log.json").write_text(json.dumps(log, indent=1) + "\n")
    print(json.dumps({k: v for k, v in log.items() if k not in ("config", "losses")}, indent=1))
    if result["last_step"] < result["steps"]:
        print(f"stopped at step {result['last_step']} of {result['steps']}: the same command with --resume goes on")


def save_model(model: Model, folder: Path, shard_mb: float) -> list[Path]:
    """The weights as bf16 in files of at most `shard_mb`; a larger tensor has one for itself. Returns the files."""
    for old in folder.glob("model*.safetensors*"):
        old.unlink()
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size=f"{round(shard_mb * 1000)}KB")
    return sorted(folder.glob("model*.safetensors"))


def save_curve(rows: list[dict[str, Any]], path: Path) -> None:
    """A row for every `log_every` steps: the mean training loss, in nats a token, and the rate of the last of them."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    import tyro

    try:
        config = tyro.cli(Config, description=__doc__)
        main(config)
        Ranks(config.device).leave()
    except ValueError as error:  # what a user can mend is one line
        sys.exit(f"pretrain.py: {error}")
