"""Recipes on a public pretrained model: PTQ and QAT of each, on one budget, scored alike; a CSV line for each result.

    python eval/real_models --model DIR --tokens-file gemma.safetensors --csv gemma.csv --jobs 8 --limit 540
    python eval/real_models --model DIR --tokens-file minilm.safetensors --csv minilm.csv --tokens 60000 --rate 5e-5
    python eval/real_models --model DIR --tokens-file gemma.safetensors --csv kv.csv --rows kv-fp8 kv-q4_0 --seeds 0 1 2

--model: a Hugging Face folder; of the tokenizer nothing is needed, as --tokens-file holds ids (tokens.py writes it).
A folder of a language model is trained by distillation from its float weights, in bfloat16 with float32 masters; an
embedding model by cosine to its float embeddings, in float32. Each of --jobs processes loads the float model once and
takes rows from a queue, a seed at a time. Processes are spread over the GPUs; several on one GPU take turns. The same
command goes on where it was stopped, and skips what the CSV holds; a row that failed stands there with its error, and
is tried again with --again.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shlex
import sys
import time
from pathlib import Path

BEGAN = time.time()
sys.path[:0] = [str(Path(__file__).resolve().parents[1])]  # eval/: this folder is a package there


def main(arguments: list[str] | None = None) -> None:
    """Run what the command line asks for."""
    import torch
    from checkout import commit

    from real_models import causal, rows, worker

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokens-file", type=Path, required=True)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--tasks-file", type=Path, help="score two tasks of lm-eval too: tasks.py writes it")
    parser.add_argument("--rows", nargs="+", help="these alone, in this order")
    parser.add_argument("--tokens", type=int, default=500_000, help="of a training run; 0: PTQ alone")
    parser.add_argument("--batch", type=int, default=8, help="blocks or sentences of a step")
    parser.add_argument("--block", type=int, default=512, help="tokens of a block; of sentences about 32")
    parser.add_argument("--rate", type=float, default=2e-5, help="learning rate, cosine to zero")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="a training run for each, with its own order")
    parser.add_argument(
        "--texts", nargs="+", default=causal.TEXTS, help="to score on; `validation` to choose a rate by"
    )
    parser.add_argument("--pages", type=int, default=0, help="score the first pages of each text only")
    parser.add_argument(
        "--prompts",
        type=int,
        default=0,
        help="compare greedy tokens of so many: KV caches, and where torchao has a twin",
    )
    parser.add_argument("--jobs", type=int, default=0, help="processes at once; 0: in this one")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which no row is begun")
    parser.add_argument("--again", action="store_true", help="forget the rows that failed")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    o = parser.parse_args(arguments)
    o.command = shlex.join(["python", "eval/real_models", *(sys.argv[1:] if arguments is None else arguments)])
    o.commit, o.until, o.embedding = commit(), BEGAN + o.limit, worker.is_embedding(o.model)
    if o.embedding and any("+" in name or name in rows.PEERS for name in o.rows or ()):
        parser.error("calibrated PTQ is of language models: an embedding model's blocks are padded")
    o.threads = max(1, (os.cpu_count() or 1) // max(1, o.jobs))
    worker.widen(o.csv)
    if o.again:
        kept = [line for line in worker.read(o.csv) if not line["error"]]
        o.csv.unlink(missing_ok=True)
        for line in kept:
            worker.append(o.csv, line)
    named = {name: rows.row(name) for name in ("float", *(o.rows or rows.every(o.embedding)))}
    units = [(name, seed) for name in named for seed in o.seeds[: 1 if name == "float" else None]]
    left = [unit for unit in units if worker.missing(o, named[unit[0]], unit[1], worker.read(o.csv))]
    context = multiprocessing.get_context("spawn")
    waiting = context.Queue()
    for unit in left:
        waiting.put(unit)
    if o.jobs:
        processes = [context.Process(target=worker.work, args=(o, waiting, i)) for i in range(min(o.jobs, len(left)))]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    else:
        worker.work(o, waiting)
    failed = {line["row"]: line["error"] for line in worker.read(o.csv) if line["error"]}
    done = worker.read(o.csv)
    undone = [f"{name} ({seed})" for name, seed in units if worker.missing(o, named[name], seed, done)]
    for name, error in failed.items():
        print(f"{name} failed: {error}", file=sys.stderr)
    if undone:
        sys.exit(f"left: {' '.join(undone)}: the same command goes on")


if __name__ == "__main__":
    main()
