"""What NVFP4's outer scale of the activations costs and brings: for the tensor, for each token, calibrated, or none at
all.

    OMP_NUM_THREADS=1 python benchmarks/outer_scales.py      # appends to benchmarks/results/outer_scales.csv

Error of the activations alone on 2^20 values, as SQNR in dB: normal, and with outliers (one channel in 128 thirty times
as large). Then word perplexity of the embedded model, quantised without training: NVFP4 weights, these activations,
windows of 256 tokens, a window a batch. Then how far the logits of a document's first 64 tokens move, relative to their
norm, when other documents stand beside it in the batch.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from beside import Table
from torch import Tensor, nn

import aoquant
from aoquant import QATConfig, get_format, quantize_
from aoquant.config import NVFP4WeightConfig
from aoquant.integrations import job, lm_eval, text

ROWS = ("nvfp4", "nvfp4-row", "nvfp4-static", "nvfp4-none", "fouroversix", "fouroversix-row")
WINDOW = 256
ROOT = Path(__file__).resolve().parents[1]


def inputs() -> dict[str, Tensor]:
    """kind -> x (1024, 1024)."""
    x = torch.randn(1024, 1024)
    outliers = x.clone()
    outliers[:, ::128] *= 30
    return {"normal": x, "outliers": outliers}


def sqnr(name: str, x: Tensor) -> float:
    format = get_format(name.removesuffix("-static"))
    if name.endswith("-static"):  # calibrated on values like these
        outer = format.measure(x).outer
        assert outer is not None
        format = format.fix(float(outer))
    error = format.fake_quantize(x) - x
    return float(10 * torch.log10(x.square().sum() / error.square().sum()))


def quantised(model: nn.Module, name: str, calibration: Tensor) -> nn.Module:
    rule = "four_over_six" if name.startswith("fouroversix") else "absmax"
    quantize_(model, QATConfig(NVFP4WeightConfig(rule=rule, activation=name)))
    if name.endswith("-static"):
        aoquant.calibrate(model, lambda m: [m(ids[None]) for ids in calibration])
    quantize_(model, QATConfig(step="convert"))
    return model


@torch.no_grad()
def moved(model: nn.Module, ids: Tensor) -> float:
    alone, beside = model(ids[:1]).logits, model(ids).logits[:1]
    return float((beside - alone).norm() / alone.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "outer_scales.csv")
    parser.add_argument("--quick", action="store_true", help="the smallest sizes: one row, one page")
    o = parser.parse_args()
    torch.manual_seed(0)
    data, pages = inputs(), 1 if o.quick else None
    tokenizer, plain = job.load_float(None, "float32", "cpu")
    train, held_out = (text.load_documents(path) for path in text.standard_text())
    beside = torch.stack([torch.tensor(tokenizer(page).input_ids[:64]) for page in held_out[:4]])
    calibration = torch.stack([torch.tensor(tokenizer(page).input_ids[:WINDOW]) for page in train[:8]])
    rows = Table(o.out, torch.device("cpu"))

    def add(name: str, model: nn.Module, errors: Sequence[float], shift: float) -> None:
        score = lm_eval.evaluate(model, tokenizer, window=WINDOW, limit=pages, progress=False)
        kinds = dict(zip((f"{kind}_dB" for kind in data), errors, strict=True))
        rows.add(
            {
                "activations": name,
                **kinds,
                "word_perplexity": score.word_perplexity,
                "moved": shift,
                "pages": score.documents,
            }
        )

    add("float32", plain, [math.inf] * len(data), 0.0)
    for name in ROWS[:1] if o.quick else ROWS:
        _, model = job.load_float(None, "float32", "cpu")
        quantised(model, name, calibration)
        add(name, model, [sqnr(name, x) for x in data.values()], moved(model, beside))


if __name__ == "__main__":
    main()
