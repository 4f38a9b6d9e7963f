"""Convert an 8B Llama's linear layers on a GPU: seconds and memory, for every recipe.

    python benchmarks/convert_speed.py [RECIPE ...] [--layers 32] [--out DIR]

Needs a CUDA device with 25 GB to spare. The layers are those of Llama-3.1-8B (q, o 4096 x 4096; k, v 1024 x 4096; gate,
up 14336 x 4096; down 4096 x 14336) in bfloat16 with random weights, 14 GB. Each recipe is prepared, calibrated if it
has static scales, and converted. One block goes first: it compiles the kernels (column "first block"), and where it
says that all 32 would take more than `PATIENCE` seconds they are not run and the row says so ("estimated").

peak: what `torch.cuda.max_memory_allocated` rose by during the conversion, in GB and in units of the largest layer in
bfloat16, 117 MB. Gate: for each shape, the packed bytes are those of the reference encoder; a red row has no numbers
and makes the exit code 1.
"""

from __future__ import annotations

import argparse
import copy
import csv
import gc
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torchao.quantization as ao
from record_golden import versions
from torch import Tensor, nn

from aoquant import QATConfig, backend, calibrate, quantize_
from aoquant.linear.prepared import QATLinear
from aoquant.linear.tensor import same_bits
from aoquant.recipes import list_recipes
from aoquant.targets import resolve

BF16, CUDA = torch.bfloat16, torch.device("cuda")
HIDDEN, KV, FFN = 4096, 1024, 14336
SHAPES = {"q": (HIDDEN, HIDDEN), "k": (KV, HIDDEN), "v": (KV, HIDDEN), "o": (HIDDEN, HIDDEN),
          "gate": (FFN, HIDDEN), "up": (FFN, HIDDEN), "down": (HIDDEN, FFN)}  # fmt: skip
LARGEST = HIDDEN * FFN * 2
TARGET, PATIENCE = 10.0, 12.0
HQQ = "torchao-int4-tile-packed, HQQ"


class Skeleton(nn.Module):
    """Blocks of linear layers, each called alone: there is no attention between them."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {name: nn.Linear(k, n, bias=False, device=CUDA, dtype=BF16) for name, (n, k) in SHAPES.items()}
            )
            for _ in range(layers)
        )

    def forward(self, x: dict[int, Tensor]) -> None:
        for block in self.blocks:
            assert isinstance(block, nn.ModuleDict)
            for linear in block.values():
                linear(x[linear.in_features])


def convert(config: Any, layers: int) -> tuple[nn.Module, float, int]:
    """(converted model, seconds, bytes by which the peak of the conversion lies above what the prepared model
    takes).
    """
    model = Skeleton(layers)
    quantize_(model, QATConfig(config))
    if any(not m.calibrated for m in model.modules() if isinstance(m, QATLinear)):
        calibrate(model, [({k: torch.randn(16, k, device=CUDA, dtype=BF16) for k in (HIDDEN, FFN)},)])
    gc.collect()  # a converted layer refers to itself, by its extra_repr
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, start = torch.cuda.memory_allocated(), time.perf_counter()
    quantize_(model, QATConfig(step="convert"))
    torch.cuda.synchronize()
    return model, time.perf_counter() - start, torch.cuda.max_memory_allocated() - before


def red(config: Any) -> list[str]:
    """Shapes whose packed bytes are not those of the reference encoder, at an eighth of the size."""
    wrong = []
    for n, k in sorted(set(SHAPES.values())):
        fast = nn.Sequential(nn.Linear(k // 2, n // 4, bias=False, device=CUDA, dtype=BF16))
        plain = copy.deepcopy(fast)
        if resolve(config).recipe.holds:
            continue  # its weight's bytes are those of the same config with dynamic scales
        quantize_(fast, config)
        with backend("reference"):
            quantize_(plain, config)
        if not same_bits(fast[0].weight.data, plain[0].weight.data):
            wrong.append(f"{n // 4} x {k // 2}")
    return wrong


def measure(name: str, config: Any, layers: int) -> dict[str, Any]:
    """One row."""
    row: dict[str, Any] = {
        "recipe": name,
        "tensor": "-",
        "first block s": "-",
        "seconds": "-",
        "peak GB": "-",
        "peak layers": "-",
    }
    if wrong := red(config):
        return row | {"verdict": f"RED: not the reference's bytes at {', '.join(wrong)}"}
    model, first, _ = convert(config, 1)
    row |= {"tensor": type(next(model.parameters()).data).__name__, "first block s": round(first, 3)}
    model, again, peak = convert(config, 1)
    how = "" if again * layers <= PATIENCE else " (estimated from one block)"
    seconds = again * layers
    if not how:
        del model
        model, seconds, peak = convert(config, layers)
    verdict = [*(["too slow"] if seconds > TARGET else []), *(["more than one layer"] if peak > LARGEST else [])]
    return row | {
        "seconds": round(seconds, 3),
        "peak GB": round(peak / 1e9, 3),
        "peak layers": round(peak / LARGEST, 2),
        "verdict": (", ".join(verdict) or "OK") + how,
    }


def write(out: Path, rows: list[dict[str, Any]], layers: int) -> None:
    """The table so far."""
    out.mkdir(parents=True, exist_ok=True)
    meta = versions(CUDA)
    with (out / "convert_speed.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*meta, "layers", *max(rows, key=len)], lineterminator="\n")
        writer.writeheader()
        writer.writerows([meta | {"layers": layers} | row for row in rows])


def main() -> int:
    """Print and write the rows; 1 on a red gate or an exception."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", help="default: all")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no CUDA device")
    configs = {r.name: r.make() for r in list_recipes() if not (r.experts or r.kv_cache)}
    configs[HQQ] = ao.Int4WeightOnlyConfig(int4_packing_format="tile_packed_to_4d", int4_choose_qparams_algorithm="hqq")
    rows, failed = [], False
    torch.manual_seed(0)
    for name in args.recipes or configs:
        try:
            row = measure(name, configs[name], args.layers)
        except Exception as error:
            row = {
                "recipe": name,
                "verdict": f"not run: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}",
            }
            failed |= not isinstance(error, ValueError)  # a layout of another device is refused by name
        failed |= str(row["verdict"]).startswith("RED")
        rows.append(row)
        print("  ".join(f"{v!s:<28}" for v in row.values()), flush=True)
        torch.cuda.empty_cache()
        write(args.out, rows, args.layers)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
