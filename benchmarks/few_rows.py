"""Packed layers of 1 to 256 rows in a CUDA graph: microseconds a call, beside nn.Linear in bf16.

    python benchmarks/few_rows.py

A graph holds 48 calls of layers in turn, with weights of 140 MB together or more, so that they come from memory and not
from a cache. What is quantised by the recipe is encoded in the graph. Graphs of one shape are replayed in turns, twelve
times; a time is the median. In brackets, bf16's time over it.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable

import torch
from graphs import in_turns
from record_golden import versions
from torch import Tensor, nn

from aoquant import quantize_
from aoquant.recipes import get_recipe

BASE, BF16 = "bf16", torch.bfloat16
RECIPES = (BASE, "int4-g128", "nvfp4-weight", "nvfp4", "fp8")
SHAPES = ((2048, 2048), (2048, 8192), (8192, 2048), (4096, 4096), (4096, 14336), (14336, 4096))  # K, N
ROWS = (1, 8, 16, 17, 32, 64, 128, 256)
CALLS, ROUNDS = 48, 12


def layers(recipe: str, k: int, n: int) -> list[nn.Module]:
    """Enough layers that a graph's weights exceed the L2 cache."""
    count = max(2, min(24, int(140e6 / (k * n * (2 if recipe == BASE else 0.5))) + 1))
    made: list[nn.Module] = []
    for _ in range(count):
        model = nn.Sequential(nn.Linear(k, n, bias=False, dtype=BF16, device="cuda"))
        if recipe != BASE:
            quantize_(model, get_recipe(recipe).make())
        made.append(model)
    return made


@torch.no_grad()
def graph_of(models: list[nn.Module], x: Tensor) -> Callable[[], None]:
    return in_turns(lambda i: models[i % len(models)](x), CALLS)


def microseconds(graphs: dict[str, Callable[[], None]]) -> dict[str, float]:
    """A call's, by recipe."""
    found: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, replay in graphs.items():
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            replay()
            first.record()
            replay()
            last.record()
            torch.cuda.synchronize()
            found[name].append(first.elapsed_time(last) / CALLS * 1e3)
    return {name: statistics.median(times) for name, times in found.items()}


def main() -> int:
    if not torch.cuda.is_available():
        sys.exit("few_rows.py needs a CUDA device")
    meta = versions(torch.device("cuda", 0)) | {"command": "python benchmarks/few_rows.py"}
    print("\n".join(f"{key:12}{value}" for key, value in meta.items()) + "\n")
    for k, n in SHAPES:
        held = {name: layers(name, k, n) for name in RECIPES}
        for rows in ROWS:
            x = torch.randn(rows, k, device="cuda", dtype=BF16)
            times = microseconds({name: graph_of(models, x) for name, models in held.items()})
            cells = " ".join(f"{name} {t:.2f} ({times[BASE] / t:.2f})" for name, t in times.items())
            print(f"K{k} N{n} M{rows} {cells}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
