"""Measure what calibrated PTQ is worth: KL to the float model, of rounding to the nearest and of other methods.

    python benchmarks/calibrated_ptq.py --calibrate train.jsonl --score test.jsonl [--formats int4-g128 nvfp4 ...]
    python benchmarks/calibrated_ptq.py ... --methods nearest awq clip r1+r2 gptq r1+r2+gptq --out FILE.csv

With `--mixed BITS` the formats are candidates of one plan, which `choose_formats` makes on the first 16 blocks.

A method is one of `CalibrateConfig`'s, whose "gptq" has the asymmetric target; "symmetric" is GPTQ as published. Where
their packages are installed, "llm-compressor" is its GPTQ, and "auto-round-N" AutoRound with N steps a block: both with
the scheme W4A16, whose grid is that of intx4-g128. A format is a weight format, "W" or "W/A" with a format of
activations. Each is calibrated on `--samples` blocks of `--length` tokens of one file, and scored on `--score-samples`
blocks of the other: KL in thousandths of a nat a token, its ratio to rounding's, and perplexity. Seconds on a CPU are
those of the process, which others do not lengthen. The model is eval/assets, or a folder. A row of CSV goes to `--out`.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

import aoquant
from aoquant import CalibrateConfig, PackedWeightConfig, choose_formats, quantize_
from aoquant.integrations.text import assets, load_documents, token_blocks

FORMATS = ("int4-g128", "int4-g32", "nvfp4-row", "gridflip-search-row", "mxfp4")
METHODS = ("nearest", "symmetric", "gptq")
PEERS = "W4A16"  # scheme of other libraries
COLUMNS = [
    "date",
    "device",
    "torch",
    "model",
    "dtype",
    "format",
    "method",
    "kl",
    "of_nearest",
    "perplexity",
    "seconds",
    "command",
]


class Scored:
    """Log probabilities of the float model on blocks of tokens, which others are compared with."""

    def __init__(self, model: Any, ids_BT: Tensor) -> None:
        self.ids_BT, self.wanted = ids_BT, [self._log_probabilities(model, ids) for ids in ids_BT]

    @torch.no_grad()
    def _log_probabilities(self, model: Any, ids_T: Tensor) -> Tensor:
        return torch.log_softmax(model(input_ids=ids_T[None]).logits[0, :-1].float(), -1)

    def __call__(self, model: Any) -> tuple[float, float]:
        """(KL in 1e-3 nats a token, perplexity)."""
        kl = nll = 0.0
        for wanted, ids in zip(self.wanted, self.ids_BT, strict=True):
            got = self._log_probabilities(model, ids)
            kl += float(F.kl_div(got, wanted, log_target=True, reduction="sum"))
            nll -= float(got.gather(1, ids[1:, None]).sum())
        tokens = self.ids_BT.numel() - len(self.ids_BT)
        return 1000 * kl / tokens, math.exp(nll / tokens)


def _config(name: str) -> Any:
    weight, _, activation = name.partition("/")
    return PackedWeightConfig(weight, activation or None)


def llm_compressor(model: Any, ids_BT: Tensor, modifier: str = "GPTQModifier") -> None:
    """Quantise a model in place by one of llm-compressor's modifiers, at its defaults."""
    oneshot = importlib.import_module("llmcompressor").oneshot
    made = getattr(importlib.import_module("llmcompressor.modifiers.quantization"), modifier)
    rows = {"input_ids": ids_BT.tolist(), "attention_mask": torch.ones_like(ids_BT).tolist()}
    data = importlib.import_module("datasets").Dataset.from_dict(rows)
    recipe = made(targets="Linear", scheme=PEERS, ignore=["lm_head"])
    oneshot(
        model=model, dataset=data, recipe=recipe, max_seq_length=ids_BT.shape[1], num_calibration_samples=len(ids_BT)
    )


def _calibrated(model: Any, method: str, config: Any, batches: list[dict[str, Tensor]], tokenizer: Any) -> Any:
    """Return the model, quantised by a method or by another library."""
    ids_BT = torch.cat([batch["input_ids"] for batch in batches])
    if method == "nearest":
        quantize_(model, config)
    elif method == "llm-compressor":
        llm_compressor(model, ids_BT)
    elif method.startswith("auto-round-"):
        limits = {"iters": int(method.rpartition("-")[2]), "nsamples": len(ids_BT), "seqlen": ids_BT.shape[1]}
        options = {"scheme": PEERS, "dataset": list(ids_BT.split(1)), "batch_size": len(batches[0]["input_ids"])}
        device = {"device_map": str(model.device), "enable_torch_compile": model.device.type == "cuda"}
        made = importlib.import_module("auto_round").AutoRound(model, tokenizer, **limits, **options, **device)
        model = made.quantize()[0].to(ids_BT.device)
    else:
        published = method == "symmetric"
        asked = CalibrateConfig(config, "gptq" if published else method, asymmetric=not published)
        aoquant.calibrate_ptq(model, batches, asked)
    return model


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--calibrate", type=Path, required=True)
    parser.add_argument("--score", type=Path, required=True)
    parser.add_argument("--formats", nargs="*", default=list(FORMATS))
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    parser.add_argument("--mixed", type=float, default=None)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--score-samples", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    folder = options.model or assets()
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def load() -> Any:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, options.dtype))
        return model.to(options.device).eval()

    def blocks(path: Path, count: int) -> Tensor:
        return token_blocks(load_documents(path), tokenizer, options.length)[:count].to(options.device)

    batches = [{"input_ids": ids} for ids in blocks(options.calibrate, options.samples).split(options.batch)]
    scored = Scored(load(), blocks(options.score, options.score_samples))
    print("| format | method | KL, 1e-3 nats | of nearest's | perplexity | seconds |\n|---|---|---|---|---|---|")
    device = torch.cuda.get_device_name() if options.device.startswith("cuda") else "CPU"
    where = (datetime.date.today().isoformat(), device, torch.__version__, folder.name, options.dtype)
    command = " ".join(["python benchmarks/calibrated_ptq.py", *(Path(a).name for a in sys.argv[1:])])
    plans: dict[str, Any] = {name: _config(name) for name in options.formats}
    if options.mixed is not None:
        candidates = list(plans.values())
        found = choose_formats(load(), candidates, batches=batches[: 16 // options.batch], bits=options.mixed)
        plans = {f"mixed-{options.mixed}": found}
        print(found)
    for name, config in plans.items():
        base = math.nan
        for method in options.methods:
            clock = time.perf_counter if options.device.startswith("cuda") else time.process_time
            model, start = load(), clock()
            model = _calibrated(model, method, config, batches, tokenizer)
            seconds = clock() - start
            kl, perplexity = scored(model)
            base = kl if method == "nearest" else base
            print(f"| {name} | {method} | {kl:.1f} | {kl / base:.2f} | {perplexity:.2f} | {seconds:.1f} |", flush=True)
            if options.out is not None:
                new = not options.out.exists()
                with options.out.open("a", newline="") as file:
                    if new:
                        csv.writer(file).writerow(COLUMNS)
                    numbers = (f"{kl:.2f}", f"{kl / base:.3f}", f"{perplexity:.2f}", f"{seconds:.1f}")
                    csv.writer(file).writerow([*where, name, method, *numbers, command])


if __name__ == "__main__":
    main()
