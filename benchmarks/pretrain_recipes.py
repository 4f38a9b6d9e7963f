"""Final losses of one small Llama trained from scratch under several recipes: same tokens, same seeds, one table.

    python benchmarks/pretrain_recipes.py --text mix.txt.xz --validation held_out.txt --out DIR --steps 600 --seeds 3

The model and its training are `eval/pretrain.py`'s. The text is encoded once and kept in DIR/corpus.pt, which a later call takes as it is;
every variant then trains in a process of its own, all of them at once on one device, since at this size the device waits for Python.
`--limit` ends them after so many seconds: runs that have ended by then count, so some variants may have more seeds than others.

Written are DIR/pretrain_recipes.csv, a row for each run, and pretrain_recipes.txt, means over seeds: bits per byte of the validation text and
the mean training loss of the last tenth, in nats a token.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

EVAL = Path(__file__).resolve().parents[1] / "eval"
# name -> recipe and backward of eval/pretrain.py
VARIANTS: dict[str, dict[str, Any]] = {
    "bf16": {"recipe": "bf16"},
    "quartet2": {"recipe": "quartet2"},
    "quartet": {"recipe": "quartet"},
    "quartet, nearest": {"recipe": "quartet", "backward": "rht32+xx-mxfp4"},  # the same scale, rounded to nearest
    "quartet2, nearest": {"recipe": "quartet2", "backward": "rht128+nvfp4"},
    "nvfp4": {"recipe": "nvfp4"},
    "gridflip": {"recipe": "gridflip"},
}
MODEL = {"vocab": 4096, "hidden": 256, "intermediate": 768, "layers": 3, "heads": 4, "kv_heads": 2, "window": 256}
TRAINING = {"batch": 16, "lr": 3e-3, "decay_fraction": 0.6, "anneal_fraction": 0.0, "log_every": 10}


def pretrain() -> Any:
    """The module eval/pretrain.py."""
    if str(EVAL) not in sys.path:
        sys.path.insert(0, str(EVAL))
    import pretrain

    return pretrain


def corpus(text: tuple[Path, ...], validation: tuple[Path, ...], out: Path) -> None:
    """Encode the text, once."""
    if (out / "corpus.pt").exists():
        return
    pretrain()
    from corpus import Sources, prepare

    data = prepare(
        Sources(text, (), validation, None, 6_000_000, MODEL["vocab"], MODEL["window"]), out / "model", "cpu"
    )
    torch.save(
        {
            "ids": data.ids.to(torch.uint16),
            "validation": data.validation.to(torch.uint16),
            "bytes": data.validation_bytes,
        },
        out / "corpus.pt",
    )


def work(name: str, seeds: list[int], steps: int, out: Path, device: str) -> None:
    """Train one variant for every seed; a line of JSON for each run."""
    script = pretrain()
    from corpus import Corpus

    torch.set_float32_matmul_precision("high")
    stored = torch.load(out / "corpus.pt", weights_only=True)
    ids, validation = (stored[key].int().to(device) for key in ("ids", "validation"))
    data = Corpus(None, ids, len(ids), validation, stored["bytes"])  # type: ignore[arg-type]
    base = {**MODEL, **TRAINING, **VARIANTS[name], "steps": steps, "warmup": max(1, steps // 15), "device": device}
    for seed in seeds:
        folder = out / f"{file_name(name)}-{seed}-{steps}"
        folder.mkdir(parents=True, exist_ok=True)
        config = script.Config(text=(Path(__file__),), out=folder, seed=seed, checkpoint_every=steps, **base)
        model = script.build_model(config)
        result = script.train(config, data, model)
        last = result["losses"][-max(1, len(result["losses"]) // 10) :]
        row = {
            "variant": name,
            "seed": seed,
            "steps": steps,
            "tokens": result["tokens_trained"],
            "bits_per_byte": round(result["validation_bits_per_byte"], 5),
            "train_loss": round(mean(last), 5),
            "seconds": result["train_seconds"],
        }
        print(json.dumps(row), flush=True)


def run_all(o: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of every variant, each in a process."""
    command = [sys.executable, __file__, "--out", str(o.out), "--steps", str(o.steps), "--seeds", str(o.seeds)]
    ends = time.monotonic() + (o.limit or float("inf"))
    processes = {}
    for name in o.variants:
        log = (o.out / f"{file_name(name)}.log").open("w")
        worker = [*command, "--device", o.device, "--worker", name]
        processes[name] = subprocess.Popen(worker, stdout=subprocess.PIPE, stderr=log, text=True)
    rows = []
    for name, process in processes.items():
        try:
            printed, _ = process.communicate(timeout=None if o.limit is None else max(0.1, ends - time.monotonic()))
            if process.returncode:
                print(f"{name} failed; see {file_name(name)}.log", file=sys.stderr)
        except subprocess.TimeoutExpired:
            process.kill()
            printed, _ = process.communicate()
        rows += [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    return rows


def file_name(variant: str) -> str:
    return variant.replace(", ", "-")


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each variant: mean and standard deviation over seeds."""
    lines = [f"{'variant':20} {'seeds':>5} {'tokens':>10} {'bits/byte':>19} {'train loss':>19} {'s/run':>6}"]
    for name in VARIANTS:
        mine = [r for r in rows if r["variant"] == name]
        if not mine:
            continue
        cells = []
        for key in ("bits_per_byte", "train_loss"):
            values = [r[key] for r in mine]
            cells.append(f"{mean(values):9.4f} +- {stdev(values) if len(values) > 1 else float('nan'):.4f}")
        seconds = mean(r["seconds"] for r in mine)
        lines.append(f"{name:20} {len(mine):5} {mine[0]['tokens']:10} {cells[0]:>19} {cells[1]:>19} {seconds:6.1f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, nargs="*", default=[])
    parser.add_argument("--validation", type=Path, nargs="*", default=[])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--limit", type=float, help="seconds after which no run is waited for")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    o = parser.parse_args()
    o.out.mkdir(parents=True, exist_ok=True)
    if o.worker:
        work(o.worker, list(range(o.seeds)), o.steps, o.out, o.device)
        return
    corpus(tuple(o.text), tuple(o.validation), o.out)
    rows = run_all(o)
    with (o.out / "pretrain_recipes.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    where = torch.cuda.get_device_name() if o.device.startswith("cuda") else "CPU"
    head = f"{where}, torch {torch.__version__}; model {MODEL}, training {TRAINING}"
    (o.out / "pretrain_recipes.txt").write_text(f"{head}\n\n{table(rows)}\n")
    print(head, table(rows), sep="\n\n")


if __name__ == "__main__":
    main()
