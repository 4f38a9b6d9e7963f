"""One small Llama trained from scratch under several recipes: held-out losses, compared run by run.

    python benchmarks/pretrain_recipes.py --text mix.txt.xz --validation held_out.txt --out DIR \\
        --steps 3000 --seeds 3 --jobs 6

The model and its training are `eval/pretrain.py`'s. The text is encoded once and kept in DIR/corpus.pt, which a later
call takes as it is.

A seed fixes initial weights and the order of the data, for every variant alike. So variants are compared seed by seed:
what a seed does to all of them drops out of the differences, whose standard error is that of the mean over seeds.
Differences between seeds are several times larger than those between recipes.

Every variant is a process, `--jobs` of them at once, which trains one seed after the other, so that it is compiled
once. A step is one CUDA graph; what a recipe does not quantise is fused by torch.compile. DIR/pretrain_recipes.csv has
a row for each validation of each run, and is rewritten with pretrain_recipes.txt every ten seconds and when `--limit`
seconds are over. The same call then goes on where the runs stopped.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import shlex
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import torch
from record_golden import versions

EVAL = Path(__file__).resolve().parents[1] / "eval"
# name -> recipe and backward of eval/pretrain.py
VARIANTS: dict[str, dict[str, Any]] = {
    "bf16": {"recipe": "bf16"},
    "bf16, again": {"recipe": "bf16"},  # how far apart two runs of the same get: a GPU adds gradients in no fixed order
    "quartet2": {"recipe": "quartet2"},
    "quartet": {"recipe": "quartet"},
    "quartet, nearest": {"recipe": "quartet", "backward": "rht32+xx-mxfp4"},  # the same scale, rounded to nearest
    "quartet2, nearest": {"recipe": "quartet2", "backward": "rht128+nvfp4"},
    "nvfp4": {"recipe": "nvfp4"},
    "gridflip": {"recipe": "gridflip"},
    # formats by GEMM direction (docs/hybrid.md)
    "fp8-hybrid": {"recipe": "fp8-hybrid"},
    "mxfp8-hp": {"recipe": "mxfp8-hp"},
    "nvfp4-hp": {"recipe": "nvfp4-hp"},
    "mxfp8-nvfp4": {"recipe": "mxfp8-nvfp4"},
    "nvfp4-mxfp8": {"recipe": "nvfp4-mxfp8"},
    "nvfp4-training": {"recipe": "nvfp4-training"},
}
# What the recipes promise, as differences.
PAIRS = [
    ("quartet2", "bf16"),
    ("quartet", "quartet2"),
    ("quartet, nearest", "quartet"),
    ("quartet2, nearest", "quartet2"),
    ("fp8-hybrid", "bf16"),
    ("mxfp8-nvfp4", "mxfp8-hp"),  # an NVFP4 backward under the same forward
    ("nvfp4-mxfp8", "nvfp4-hp"),
    ("nvfp4-training", "nvfp4-hp"),
]
MODEL = {"vocab": 4096, "hidden": 256, "intermediate": 768, "layers": 6, "heads": 4, "kv_heads": 2, "window": 256}
TRAINING = {"batch": 32, "lr": 1e-3, "decay_fraction": 1.0, "anneal_fraction": 0.0, "log_every": 50}
VALIDATIONS = 4  # of a run, the last one at its end


class Run(NamedTuple):
    """A variant with a seed."""

    variant: str
    seed: int

    def folder(self, o: argparse.Namespace) -> Path:
        path: Path = o.out / f"{self.variant.replace(', ', '-')}-{self.seed}-{o.steps}"
        return path

    def ended(self, o: argparse.Namespace) -> bool:
        return (self.folder(o) / "row.json").exists()


def log_of(o: argparse.Namespace, variant: str) -> Path:
    path: Path = o.out / f"{variant.replace(', ', '-')}.log"
    return path


def settings(o: argparse.Namespace) -> dict[str, Any]:
    """MODEL and TRAINING with the changes of --set."""
    if wrong := [pair for pair in o.set if pair.count("=") != 1]:
        raise SystemExit(f"--set takes NAME=VALUE, got {', '.join(wrong)}")
    changes = dict(pair.split("=") for pair in o.set)
    found = {**MODEL, **TRAINING}
    if unknown := changes.keys() - found.keys():
        raise SystemExit(f"--set knows {', '.join(found)}, got {', '.join(sorted(unknown))}")
    return found | {name: type(found[name])(value) for name, value in changes.items()}


def corpus(o: argparse.Namespace) -> None:
    """Encode the text, once."""
    if (o.out / "corpus.pt").exists():
        return
    if not (o.text and o.validation):
        raise SystemExit(f"--text and --validation are needed: {o.out} has no corpus.pt of an earlier call")
    sys.path.insert(0, str(EVAL))
    from corpus import Sources, prepare

    model = settings(o)
    texts = tuple(o.text), (), tuple(o.validation)
    data = prepare(Sources(*texts, None, 6_000_000, model["vocab"], model["window"]), o.out / "model", "cpu")
    ids, validation = data.ids.to(torch.uint16), data.validation.to(torch.uint16)
    torch.save({"ids": ids, "validation": validation, "bytes": data.validation_bytes}, o.out / "corpus.pt")


def work(o: argparse.Namespace, run: Run, model: torch.nn.Module | None = None) -> torch.nn.Module:
    """Train one run, from its checkpoint if it has one; writes row.json. Returns the model; one that was given is
    trained again.
    """
    sys.path.insert(0, str(EVAL))
    import pretrain
    from corpus import Corpus

    torch.set_float32_matmul_precision("high")
    stored = torch.load(o.out / "corpus.pt", weights_only=True)
    ids, validation = (stored[key].int().to(o.device) for key in ("ids", "validation"))
    every, cuda, folder = max(1, o.steps // VALIDATIONS), o.device.startswith("cuda"), run.folder(o)
    folder.mkdir(parents=True, exist_ok=True)
    config = pretrain.Config(
        text=(Path(__file__),), out=folder, seed=run.seed, steps=o.steps, warmup=max(1, o.steps // 10), device=o.device,
        graph=cuda, compile=cuda, checkpoint_every=every, validate_every=every, resume=(folder / "checkpoint.pt").exists(),
        **settings(o), **VARIANTS[run.variant],
    )  # fmt: skip
    fresh: Any = pretrain.build_model(config)
    if model is None:
        model = fresh
    else:  # what is compiled for a model serves that model alone
        model.load_state_dict(fresh.state_dict())
    data = Corpus(None, ids, len(ids), validation, stored["bytes"])  # type: ignore[arg-type]
    result = pretrain.train(config, data, model)  # type: ignore[arg-type]
    losses = result["losses"]
    row = {
        "step": o.steps,
        "bits_per_byte": result["validation_bits_per_byte"],
        "train_loss": mean(losses[-max(1, len(losses) // 10) :]),
        "seconds": result["train_seconds"],
    }
    (folder / "row.json").write_text(json.dumps(row))
    return model


def work_all(o: argparse.Namespace, variant: str) -> None:
    """Train what has not ended of a variant, seed by seed."""
    model = None
    for run in (Run(variant, seed) for seed in range(o.seeds)):
        if not run.ended(o):
            model = work(o, run, model)


def run_all(o: argparse.Namespace, runs: list[Run]) -> None:
    """Run what has not ended yet, `o.jobs` variants at once; write the tables as they come."""
    written = time.monotonic()
    ends = written + (o.limit or math.inf)
    waiting = [v for v in o.variants if not all(run.ended(o) for run in runs if run.variant == v)]
    running: dict[str, subprocess.Popen[bytes]] = {}
    try:
        while (waiting or running) and time.monotonic() < ends:
            while waiting and len(running) < o.jobs:
                variant = waiting.pop(0)
                with log_of(o, variant).open("a") as log:
                    worker = [sys.executable, *sys.argv, "--worker", variant]
                    running[variant] = subprocess.Popen(worker, stdout=log, stderr=log)
            for variant in [variant for variant, process in running.items() if process.poll() is not None]:
                if running.pop(variant).returncode:
                    print(f"{variant} failed; see {log_of(o, variant)}", file=sys.stderr)
            if time.monotonic() > written + 10:
                write(o, runs)
                written = time.monotonic()
            time.sleep(0.1)
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    write(o, runs)


def read(o: argparse.Namespace, runs: list[Run]) -> list[dict[str, Any]]:
    """A row for each validation of each run."""
    stored = torch.load(o.out / "corpus.pt", weights_only=True)
    nats = math.log(2) * stored["bytes"] / len(stored["validation"])  # a token's, from a byte's bits
    rows = []
    for run in runs:
        folder, found = run.folder(o), {}
        for path in (folder / "validation.jsonl", folder / "row.json"):
            lines = path.read_text().splitlines() if path.exists() else []
            found |= {point["step"]: point for point in map(json.loads, lines)}  # a step done twice counts once
        for step, point in sorted(found.items()):
            model = settings(o)
            train_loss = point.get("train_loss", math.nan)
            rows.append(
                {
                    "variant": run.variant,
                    "seed": run.seed,
                    "step": step,
                    "steps": o.steps,
                    "tokens": step * model["batch"] * model["window"],
                    "held_out_loss": round(point["bits_per_byte"] * nats, 5),
                    "bits_per_byte": round(point["bits_per_byte"], 5),
                    "train_loss": round(train_loss, 5),
                    "seconds": point.get("seconds", math.nan),
                }
            )
    return rows


def difference(rows: list[dict[str, Any]], a: str, b: str, key: str = "held_out_loss") -> str:
    """a's values less b's, seed by seed: mean and its standard error; "" without a seed that both have."""
    of = {name: {r["seed"]: r[key] for r in rows if r["variant"] == name} for name in (a, b)}
    values = [of[a][seed] - of[b][seed] for seed in sorted(of[a].keys() & of[b].keys())]
    if not values:
        return ""
    error = f" +- {stdev(values) / math.sqrt(len(values)):.4f}" if len(values) > 1 else ""
    return f"{mean(values):+.4f}{error}"


def table(rows: list[dict[str, Any]]) -> str:
    """Variants at the end of training; what the recipes promise; the differences on the way there."""
    variants = [name for name in VARIANTS if any(r["variant"] == name for r in rows)]
    last = [r for r in rows if r["step"] == r["steps"]]
    form = "{:18} {:>5} {:>10} {:>9} {:>18} {:>18} {:>9} {:>6}"
    lines = [
        form.format("variant", "seeds", "tokens", "held-out", "less bf16", "training less bf16", "bits/byte", "s/run")
    ]
    for name in variants:
        if mine := [r for r in last if r["variant"] == name]:
            loss, bits, seconds = (mean(r[key] for r in mine) for key in ("held_out_loss", "bits_per_byte", "seconds"))
            less = [
                "" if name == "bf16" else difference(last, name, "bf16", key) for key in ("held_out_loss", "train_loss")
            ]
            cells = [name, len(mine), mine[0]["tokens"], f"{loss:.4f}", *less, f"{bits:.4f}", f"{seconds:.1f}"]
            lines.append(form.format(*cells))
    lines += ["", "held-out loss, seed by seed"]
    lines += [f"{f'{a} less {b}':40} {found}" for a, b in PAIRS if (found := difference(last, a, b))]
    lines += ["", "held-out loss less bf16's after so many tokens"]
    for tokens in sorted({r["tokens"] for r in rows}):
        then = [r for r in rows if r["tokens"] == tokens]
        found = {name: difference(then, name, "bf16") for name in variants if name != "bf16"}
        lines.append(f"{tokens:10}  " + "; ".join(f"{name} {value}" for name, value in found.items() if value))
    return "\n".join(lines)


def command(o: argparse.Namespace) -> str:
    """What a reader would type; folders of this machine left out."""
    words = ["python", "benchmarks/pretrain_recipes.py", "--out", "DIR", "--steps", o.steps, "--seeds", o.seeds]
    words += ["--text", *(path.name for path in o.text)] if o.text else []
    words += ["--validation", *(path.name for path in o.validation)] if o.validation else []
    words += ["--variants", *o.variants] if o.variants != list(VARIANTS) else []
    words += ["--set", *o.set] if o.set else []
    return shlex.join([*map(str, words), "--jobs", str(o.jobs)])


def write(o: argparse.Namespace, runs: list[Run]) -> None:
    """pretrain_recipes.csv and .txt, of what there is."""
    if not (rows := read(o, runs)):
        return
    with (o.out / "pretrain_recipes.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    meta = versions(torch.device(o.device)) | {"command": command(o)}
    head = "\n".join(f"{key:12}{value}" for key, value in meta.items()) + f"\n\n{settings(o)}; losses in nats a token"
    (o.out / "pretrain_recipes.txt").write_text(f"{head}\n\n{table(rows)}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, nargs="*", default=[])
    parser.add_argument("--validation", type=Path, nargs="*", default=[])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=1, help="variants at once, on one device")
    parser.add_argument("--limit", type=float, help="seconds after which no run is waited for")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="of the model or its training")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    o = parser.parse_args()
    if o.worker:
        work_all(o, o.worker)
        return
    o.out.mkdir(parents=True, exist_ok=True)
    corpus(o)
    run_all(o, [Run(variant, seed) for seed in range(o.seeds) for variant in o.variants])
    if (o.out / "pretrain_recipes.txt").exists():
        print((o.out / "pretrain_recipes.txt").read_text())


if __name__ == "__main__":
    main()
