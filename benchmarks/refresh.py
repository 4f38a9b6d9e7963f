"""How long `aoquant.refresh_` takes, and what memory it needs: a converted copy follows a model in training.

    python benchmarks/refresh.py [RECIPE ...] [--hidden 4096] [--layers 32] [--out DIR]

An 8B Llama with random weights on one GPU of 80 GB or more; two minutes. Both models are there, as in training with
rollouts. Weights change before each refresh. Nothing is timed before the gate: after a refresh the logits of the two
are equal, bit for bit, and every tensor of the copy is where it was. `extra` is the peak beyond both models; `layer` is
the largest layer's bf16 weight. Writes `benchmarks/results/refresh_<gpu>.txt`.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from pathlib import Path

import torch
from llamas import build, llama
from record_golden import versions
from torch import nn

from aoquant import PackedTensor, QATConfig, quantize_, refresh_
from aoquant.recipes import get_recipe

RECIPES = ("int4-g128", "vllm-w4a16-g128", "vllm-fp8", "vllm-int8", "mxfp4", "nvfp4", "gridflip")
TIMES = 5
MIB = 2**20


def places(model: nn.Module) -> list[int]:
    """Where the tensors of a model are."""
    return [p.qdata.data_ptr() if isinstance(p, PackedTensor) else p.data_ptr() for p in model.parameters()]


@torch.no_grad()
def measured(recipe: str, hidden: int, layers: int, device: torch.device) -> str:
    """A recipe's row."""
    prepared = build(llama(hidden, layers, 128256), device).eval()
    quantize_(prepared, get_recipe(recipe).prepare())
    packed = copy.deepcopy(prepared)
    quantize_(packed, QATConfig(step="convert"))
    ids = torch.arange(64, device=device).view(2, 32)
    before, seconds, extra = places(packed), [], 0
    for attempt in range(TIMES + 1):
        for p in prepared.parameters():
            p.mul_(1 + 0.01 * (attempt + 1))
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        held, start = torch.cuda.memory_allocated(device), time.perf_counter()
        count = refresh_(packed, prepared)
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
        extra = max(extra, torch.cuda.max_memory_allocated(device) - held)
        if attempt == 0 and not torch.equal(packed(ids).logits, prepared(ids).logits):
            return f"{recipe:18}other logits after a refresh: not timed"
    if places(packed) != before:
        return f"{recipe:18}tensors moved: not timed"
    layer = max(p.numel() * p.element_size() for n, p in prepared.named_parameters() if n.endswith("_proj.weight"))
    first, *timed = seconds
    timed.sort()
    return (
        f"{recipe:18}{count:7}{timed[TIMES // 2]:10.4f}{timed[0]:10.4f}{timed[-1]:10.4f}{first:10.3f}"
        f"{extra / MIB:10.0f}{layer / MIB:10.0f}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=RECIPES)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args()
    device = torch.device("cuda")
    lines = [f"{k:12}{v}" for k, v in versions(device).items()]
    lines += [f"{'model':12}Llama, {given.hidden} wide, {given.layers} layers", ""]
    lines.append(
        f"{'recipe':18}{'layers':>7}{'median s':>10}{'least':>10}{'most':>10}{'first':>10}{'extra MiB':>10}{'layer MiB':>10}"
    )
    print(lines[-1])
    for recipe in given.recipes:
        lines.append(measured(recipe, given.hidden, given.layers, device))
        print(lines[-1], flush=True)
        torch.cuda.empty_cache()
    gpu = torch.cuda.get_device_name().removeprefix("NVIDIA ").lower().replace(" ", "_")
    given.out.mkdir(parents=True, exist_ok=True)
    out = given.out / f"refresh_{gpu}.txt"
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
