"""What NVFP4's outer scale of the activations costs and brings: for the tensor, for each token, calibrated, or none at
all.

    OMP_NUM_THREADS=1 python benchmarks/outer_scales.py

Error of the activations alone on 2^20 values, as SQNR in dB: normal, and with outliers (one channel in 128 thirty times
as large). Then word perplexity of the embedded model, quantised without training: NVFP4 weights, these activations,
windows of 256 tokens, a window a batch. Then how far the logits of a document's first 64 tokens move, relative to their
norm, when other documents stand beside it in the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import aoquant
from aoquant import QATConfig, get_format, quantize_
from aoquant.config import NVFP4WeightConfig
from aoquant.integrations import job, lm_eval, text

ROWS = ("nvfp4", "nvfp4-row", "nvfp4-static", "nvfp4-none", "fouroversix", "fouroversix-row")
WINDOW = 256


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
    torch.manual_seed(0)
    data = inputs()
    print(
        "| activations | " + " | ".join(f"{kind}, dB" for kind in data) + " | perplexity | logits moved by the batch |"
    )
    print("|---|" + "--:|" * (len(data) + 2))
    tokenizer, plain = job.load_float(None, "float32", "cpu")
    pages = text.load_documents(text.assets() / "heldout.jsonl")
    beside = torch.stack([torch.tensor(tokenizer(page).input_ids[:64]) for page in pages[:4]])
    train = text.load_documents(text.assets() / "train.jsonl")
    calibration = torch.stack([torch.tensor(tokenizer(page).input_ids[:WINDOW]) for page in train[:8]])
    score = lm_eval.evaluate(plain, tokenizer, window=WINDOW, progress=False)
    print("| float32 |" + " |" * len(data) + f" {score.word_perplexity:.2f} | |", flush=True)
    for name in ROWS:
        errors = [f"{sqnr(name, x):.2f}" for x in data.values()]
        _, model = job.load_float(None, "float32", "cpu")
        quantised(model, name, calibration)
        score = lm_eval.evaluate(model, tokenizer, window=WINDOW, progress=False)
        cells = [name, *errors, f"{score.word_perplexity:.2f}", f"{moved(model, beside):.1e}"]
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
