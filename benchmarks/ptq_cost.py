"""Measure calibrated PTQ at the shape of an 8B Llama: seconds a billion parameters, by stage, and peak memory.

    python benchmarks/ptq_cost.py [--recipes int4-g128] [--layers 2] [--samples 128] [--length 2048]

A few decoder layers of the shape are calibrated whole, with random weights and random tokens. The time of the layers
behind the first one (which waits for compilers) is divided by their parameters. All layers of the 8B model are alike,
so this is its time per parameter; embedding and head are not quantised and not counted. Stages come from a run of
their own, which waits for the GPU around each of them; their sum is more than the time. `memory` is the peak less what
the model takes. With `--gram` one row says what operands in bfloat16 lose in a Gram matrix against float32.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from beside import Table
from llamas import Size, build, llama

from aoquant import CalibrateConfig, calibrate_ptq
from aoquant.formats import get_format
from aoquant.ptq import blocks, gptq, gram, sequential

STAGES = {
    "gram": (gram.InputGram, "add"),
    "factor": (gptq, "factor"),
    "target": (gptq, "towards_float"),
    "columns": (gptq, "round_columns"),
    "levels": (gptq.Levels, "of"),
    "codes": (gptq, "choose_codes"),  # with columns, levels and errors
    "place": (sequential._Run, "_place"),
    "next": (blocks, "_advance"),
    "input": (sequential._Run, "_gram"),  # with gram
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--recipes", nargs="+", default=["int4-g128"], help="names of recipes")
    add("--layers", type=int, default=2, help="decoder layers; at least 2")
    add("--samples", type=int, default=128)
    add("--length", type=int, default=2048)
    add("--batch", type=int, default=4, help="sequences in one forward")
    add("--hidden", type=int, default=4096)
    add("--symmetric", action="store_true", help="plain GPTQ, without the asymmetric target")
    add("--gram", action="store_true", help="measure what bfloat16 operands lose")
    add("--quick", action="store_true", help="small sizes, for a test on a CPU")
    add("--out", type=Path, default=Path(__file__).resolve().parent / "results" / "ptq_cost.csv")
    o = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = Size(128, 256, 4, 2, o.layers, 256) if o.quick else llama(o.hidden, o.layers, 8192)
    samples, length = (4, 64) if o.quick else (o.samples, o.length)
    generator = torch.Generator(device).manual_seed(0)
    ids = torch.randint(size.vocabulary, (samples, length), generator=generator, device=device)
    batches = [{"input_ids": some} for some in ids.split(o.batch)]
    table = Table(o.out, device)
    for name in o.recipes:
        config = CalibrateConfig(name, asymmetric=not o.symmetric)
        seconds, memory, parameters, rows = _calibrated(size, device, batches, config)
        stages = Counter[str]()
        with _timed(stages, device):
            _calibrated(size, device, batches, config)
        share = 1 / (o.layers * parameters)
        table.add(
            {
                "recipe": name,
                "asymmetric": config.asymmetric,
                "hidden": size.hidden,
                "layers": o.layers,
                "tokens": samples * length,
                "layer_parameters": parameters,
                "s_per_billion": 1e9 * seconds / parameters,
                "extra_gib": memory / 2**30,
                "ratio": sum(r.error for r in rows) / sum(r.nearest for r in rows),
                **{f"{stage}_s_per_billion": 1e9 * stages[stage] * share for stage in STAGES},
            }
        )
        print(
            f"{name}: 32 layers would take 32 times {seconds:.2f} s = {32 * seconds:.0f} s (extrapolated)", flush=True
        )
    if o.gram:
        _gram_loss(size, device)


def _calibrated(size: Size, device: torch.device, batches: list[Any], config: CalibrateConfig) -> Any:
    """Calibrate a new model. Returns seconds of a layer behind the first one, bytes, a layer's parameters, rows."""
    model = build(size, device)
    parameters = sum(p.numel() for p in model.model.layers[0].parameters() if p.dim() == 2)
    ends, write = list[float](), sequential._Run._visit
    before = _memory(device)

    def visited(*arguments: Any) -> Any:
        made = write(*arguments)
        ends.append(_now(device))
        return made

    with mock.patch.object(sequential._Run, "_visit", visited):
        report = calibrate_ptq(model, batches, config)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return (ends[-1] - ends[0]) / (len(ends) - 1), peak - before, parameters, report.rows


def _memory(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


@contextmanager
def _timed(stages: Counter[str], device: torch.device) -> Iterator[None]:
    """Add up the seconds of each stage inside."""
    patches = []
    for stage, (owner, name) in STAGES.items():
        function = getattr(owner, name)

        def timed(*arguments: Any, stage: str = stage, function: Any = function, **named: Any) -> Any:
            start = _now(device)
            try:
                return function(*arguments, **named)
            finally:
                stages[stage] += _now(device) - start  # type: ignore[assignment]

        patches.append(mock.patch.object(owner, name, timed))
    try:
        for patch in patches:
            patch.start()
        yield
    finally:
        for patch in patches:
            patch.stop()


def _gram_loss(size: Size, device: torch.device) -> None:
    """Print what operands in bfloat16 lose in a Gram matrix of float32 inputs, and in the codes that follow from it."""
    torch.manual_seed(0)
    k, n = size.hidden, 1024
    spread = torch.randn(k, device=device).mul(1.5).exp()
    x_MK = (torch.randn(16 * k, k, device=device) @ torch.randn(k, k, device=device) / k**0.5) * spread
    w_NK = torch.randn(n, k, device=device, dtype=torch.bfloat16)
    format = get_format("int4-g32")
    exact = x_MK.double().mT @ x_MK.double() / len(x_MK)
    errors = []
    for name, operand in (("bf16", torch.bfloat16), ("f32", torch.float32)):
        x = x_MK.to(operand).float()  # products of bfloat16 values are exact in float32
        h_KK = x.mT @ x / len(x)
        off = float((h_KK.double() - exact).norm() / exact.norm())
        factor = gptq.factor(h_KK, 0.01, True)
        diagonal_K = factor.write_upper(h_KK)
        weight = gptq.Weight(w_NK.float(), format.encode(w_NK), h_KK, diagonal_K, factor.order_K)
        ((encoded, _),) = gptq.choose_codes([weight], format, w_NK.dtype)
        d = w_NK.double() - format.decode(encoded, w_NK.dtype).double()
        errors.append(float(((d @ exact) * d).sum()))
        print(f"gram of {name} operands: relative error {off:.1e}")
    print(f"error of the layer's output, bf16 over f32: {errors[0] / errors[1]:.5f}")


if __name__ == "__main__":
    main()
