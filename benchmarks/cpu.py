"""What fake quantisation costs a training step on a CPU, beside torchao's QAT of the same base in the same run; and
what packed layers save `generate`.

    OMP_NUM_THREADS=1 python benchmarks/cpu.py [--rounds N] [--only NAME ...] [--out DIR]
    OMP_NUM_THREADS=2 python benchmarks/cpu.py generate [--rounds N] [--models NAME ...] [--out DIR]

`generate` is cpu_serve.py's. The rest of this page is about the training step.

One bf16 layer of 1024 x 1024 without bias and 256 tokens: forward, and backward to input and weight, eager, prepared by
aoquant, prepared by torchao, and plain. A round runs them one after another and its ratios are taken within it, so that
what else the machine does hits all alike; the cells are medians over rounds. With one thread the clock counts this
process's time alone.

Each row is shown twice: with torchao's config the layer computes what torchao's deployed layer computes; with aoquant's
own, one float32 sum and one rounding, whose GEMM takes a CPU longer than bf16's. torchao's NVFP4 runs on Blackwell
alone, so its GEMM is given a stand-in. The exit code is 1 when a row of ours takes longer than torchao's by more than
`SLACK`.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torchao
import torchao.prototype.mx_formats as mx
import torchao.quantization as ao
from cpu_serve import MODELS, serve
from torch import Tensor, nn
from torchao.prototype.qat import nvfp4 as torchao_nvfp4
from torchao.quantization.qat import QATConfig as TorchaoQATConfig
from torchao.quantization.quantize_.common import KernelPreference

import aoquant
from aoquant import QATConfig

sys.path.append(str(Path(__file__).resolve().parents[1] / "eval"))
from checkout import commit

N, K, TOKENS, BF16 = 1024, 1024, 256, torch.bfloat16
SLACK = 1.25  # medians of a busy machine differ by a tenth from run to run
clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter  # one thread: blind to the neighbours
FP8, FP4, EMULATED = torch.float8_e4m3fn, torch.float4_e2m1fn_x2, KernelPreference.EMULATED
_INT4: Any = torch.int4  # type: ignore[attr-defined]

# name -> torchao's base, and aoquant's own config for the same numbers of bits
ROWS: dict[str, tuple[Any, Any]] = {
    "int4": (ao.Int4WeightOnlyConfig(group_size=128), aoquant.Int4WeightConfig(128)),
    "intx": (ao.IntxWeightOnlyConfig(_INT4, ao.PerGroup(32)), aoquant.IntxWeightConfig(4, 32)),
    "int8-int4": (
        ao.Int8DynamicActivationIntxWeightConfig(_INT4, ao.PerGroup(32)),
        aoquant.IntxWeightConfig(4, 32, activation="int8-row-asym"),
    ),
    "fp8": (ao.Float8DynamicActivationFloat8WeightConfig(granularity=ao.PerRow()), aoquant.FP8WeightConfig()),
    "fp8-int4": (
        ao.Float8DynamicActivationInt4WeightConfig(),
        aoquant.Int4WeightConfig(128, activation="fp8-row"),
    ),
    "mxfp8": (
        mx.MXDynamicActivationMXWeightConfig(32, FP8, FP8, kernel_preference=EMULATED),
        aoquant.MXFP8WeightConfig(),
    ),
    "mxfp4": (
        mx.MXDynamicActivationMXWeightConfig(32, FP4, FP4, kernel_preference=EMULATED),
        aoquant.MXFP4WeightConfig(),
    ),
    "nvfp4": (mx.NVFP4DynamicActivationNVFP4WeightConfig(use_triton_kernel=False), aoquant.NVFP4WeightConfig()),
}


def layer() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(K, N, bias=False, dtype=BF16))


def step(model: nn.Module) -> Callable[[], float]:
    """A function that runs forward and backward once and returns its seconds."""
    x, g = torch.randn(TOKENS, K, dtype=BF16).requires_grad_(), torch.randn(TOKENS, N, dtype=BF16)

    def run() -> float:
        x.grad = None
        model.zero_grad()
        start = clock()
        model(x).backward(g)
        return clock() - start

    return run


def emulated_nvfp4(x: Any, w: Any, op: Any, bias: Any = None) -> Tensor:
    """torchao's NVFP4 GEMM exists on Blackwell alone; elsewhere its backward's way of reading the tensors has to do."""
    return nn.functional.linear(x.dequantize(x.orig_dtype), w.t().dequantize(w.orig_dtype), bias)


def theirs(base: Any) -> nn.Module:
    torchao_nvfp4._addmm_nvfp4_dispatch = emulated_nvfp4
    model = layer()
    ao.quantize_(model, TorchaoQATConfig(base, step="prepare"))
    return model


def ours(config: Any) -> nn.Module:
    model = layer()
    aoquant.quantize_(model, QATConfig(config))
    return model


def ratios(name: str, rounds: int) -> list[tuple[str, float, float, float]]:
    """(which config, ours / linear, torchao's / linear, ours / torchao's) of one row."""
    base, own = ROWS[name]
    configs = {"torchao's config": base, "own config": own}
    steps = [step(layer()), step(theirs(base)), *(step(ours(c)) for c in configs.values())]
    for run in steps * 2:  # warm up: allocator, oneDNN's kernels
        run()
    times = []
    for i in range(rounds):
        order = list(range(len(steps)))
        order = order[i % len(order) :] + order[: i % len(order)]
        measured = {j: steps[j]() for j in order}
        times.append([measured[j] for j in range(len(steps))])

    def median(a: int, b: int) -> float:
        return statistics.median(t[a] / t[b] for t in times)

    return [(which, median(j, 0), median(1, 0), median(j, 1)) for j, which in enumerate(configs, start=2)]


def facts(rounds: int, part: str = "") -> dict[str, str]:
    """What the numbers were measured on and with."""
    cpu = platform.processor() or platform.machine()
    if (info := Path("/proc/cpuinfo")).exists():
        fields = dict(line.split("\t: ", 1) for line in info.read_text().splitlines() if "\t: " in line)
        fields = {k.strip(): v for k, v in fields.items()}
        numbers = ", ".join(f"{k} {fields[k]}" for k in ("cpu family", "model", "stepping") if k in fields)
        cpu = f"{fields.get('model name', cpu)} ({numbers})"
    versions = {m.__name__: m.__version__ for m in (torch, torchao)}
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": commit() or "unknown",
        "cpu": f"{cpu}; {torch.backends.cpu.get_cpu_capability()}",
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        **versions,
        "command": f"OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', '')} python benchmarks/cpu.py {part + ' ' if part else ''}--rounds {rounds}",
    }


def main() -> int:
    """Print the table; 1 if a row of ours is slower than torchao's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=("train", "generate"), default="train")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="of generate")
    parser.add_argument("--prompt", type=int, default=16, help="of generate")
    parser.add_argument("--new", type=int, default=4, help="tokens that are generated")
    parser.add_argument("--prefill", type=int, default=256, help="tokens")
    parser.add_argument(
        "--out",
        type=Path,
        help="write the table here, as cpu_<threads>.csv, cpu_generate.csv or cpu_generate_1_thread.csv",
    )
    args = parser.parse_args()
    if args.part == "generate":
        return serve(args, facts(args.rounds, args.part), clock)

    lines = [f"# {key}: {value}" for key, value in facts(args.rounds).items()]
    lines += [f"# bf16, N = {N}, K = {K}, {TOKENS} tokens, forward + backward; times nn.Linear's", ""]
    lines.append("name,aoquant given,aoquant,torchao,aoquant / torchao,verdict")
    print("\n".join(lines), flush=True)
    slow = 0
    for name in args.only:
        for which, mine, other, between in ratios(name, args.rounds):
            verdict = "OK" if between <= 1 else "within the noise" if between <= SLACK else "FAIL: slower than torchao"
            slow += between > SLACK
            lines.append(f"{name},{which},{mine:.2f},{other:.2f},{between:.2f},{verdict}")
            print(lines[-1], flush=True)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        threads = torch.get_num_threads()
        (args.out / f"cpu_{threads}_thread{'s' * (threads > 1)}.csv").write_text("\n".join(lines) + "\n")
    return int(slow > 0)


if __name__ == "__main__":
    sys.exit(main())
