"""Measure what the package promises, on real layers and real kernels: prepared(x) against converted(x).

    python benchmarks/parity.py [--device cuda|cpu] [--workers N] [--out DIR]

Needs torch and torchao; where a deployed kernel is missing (int4's is in `mslk-cuda`, for NVIDIA GPUs) the row says
"not run" and why. Takes minutes, most of them for compiling kernels: N processes do it at once. With `--out`, the table
is also written to DIR/parity_<gpu>.txt.

One bf16 layer of N x K with bias, under every recipe and torchao's other configs, at M rows from decoding to training:
"equal" is every element; a number is the SQNR of converted against prepared in dB, finite only where two kernels sum
the same exact products in another order. gemm: what runs the prepared layer's. cos dW, cos dx: gradients at M = 128
against those of the float nn.Linear.
compiled: whether torch.compile(fullgraph=True) of the prepared layer leaves output and gradients as they were. The exit
code is 1 when a line says FAIL: an exception, an output that is not finite, compiled unlike eager, a cosine or an SQNR
below its bound.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torchao.prototype.mx_formats as mx
import torchao.quantization as ao
from record_golden import versions
from torch import Tensor, nn
from torchao.quantization.quantize_.common import KernelPreference

from aoquant import QATConfig, calibrate, explain, quantize_
from aoquant.ops import Request
from aoquant.recipes import get_recipe, list_recipes
from aoquant.report.measure import is_packed, sqnr
from aoquant.tools.doctor import MISSING_KERNEL

BF16, N, K, M_GRAD, MS = torch.bfloat16, 1024, 2048, 128, (1, 16, 128, 2048)
BOUND, COSINE = 50.0, 0.9  # bf16 outputs of other sums agree to about 55 dB; two-bit weights turn dx to 0.94
COMPILED = ("nvfp4", "int4-g128", "torchao-fp8")
FP8, FP4, EMULATED = torch.float8_e4m3fn, torch.float4_e2m1fn_x2, KernelPreference.EMULATED
TORCHAO: dict[str, Any] = {  # beside the four of torchao's configs that are recipes
    "IntxWeightOnly int4 g32": ao.IntxWeightOnlyConfig(torch.int4, ao.PerGroup(32)),  # type: ignore[attr-defined]
    "Int4WeightOnly g64": ao.Int4WeightOnlyConfig(group_size=64),
    "Int8WeightOnly row": ao.Int8WeightOnlyConfig(granularity=ao.PerRow(), version=2),
    "Float8WeightOnly row": ao.Float8WeightOnlyConfig(granularity=ao.PerRow()),
    "Float8Dynamic tensor": ao.Float8DynamicActivationFloat8WeightConfig(granularity=ao.PerTensor()),
    "MX mxfp8 emulated": mx.MXDynamicActivationMXWeightConfig(32, FP8, FP8, kernel_preference=EMULATED),
    "MX mxfp4 emulated": mx.MXDynamicActivationMXWeightConfig(32, FP4, FP4, kernel_preference=EMULATED),
    "NVFP4WeightOnly": mx.NVFP4WeightOnlyConfig(),
}


def passes(run: Any, layer: Any, x: Tensor, g: Tensor) -> list[Tensor]:
    """[y, dW, dbias, dx] of run(x), which computes with `layer`'s parameters."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    y = run(x)
    y.backward(g)
    return [y.detach(), layer.weight.grad, layer.bias.grad, x.grad]


def config(name: str) -> QATConfig:
    """How a line's layer is prepared."""
    return QATConfig(TORCHAO[name]) if name in TORCHAO else get_recipe(name).prepare()


def line(name: str, device: torch.device, ms: tuple[int, ...]) -> tuple[str, ...]:
    """One line of the table, whatever happens."""
    try:
        return measure(name, config(name), device, ms)
    except Exception as error:
        detail = f"FAIL: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        return name, *["-"] * (len(ms) + 5), detail


def measure(name: str, prepare: QATConfig, device: torch.device, ms: tuple[int, ...]) -> tuple[str, ...]:
    """One line of the table; the last cell is the verdict."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(K, N, dtype=BF16)).to(device)
    xs = {m: torch.randn(m, K, dtype=BF16).to(device) for m in ms}
    x, g = xs[M_GRAD], torch.randn(M_GRAD, N, dtype=BF16).to(device)
    plain = passes(model, model[0], x, g)
    quantize_(model, prepare)
    prepared: Any = model[0]
    if not prepared.calibrated:
        calibrate(model, [x])
    eager = passes(prepared, prepared, x, g)
    cosines = [torch.cosine_similarity(eager[i].double().flatten(), plain[i].double().flatten(), 0) for i in (1, 3)]
    bad, compiled = set() if min(cosines) > COSINE else {"gradient"}, "-"
    if name in COMPILED:
        torch._dynamo.reset()
        run: Any = torch.compile(prepared, fullgraph=True)
        same = [torch.equal(*pair) for pair in zip(passes(run, prepared, x, g), eager, strict=True)]
        same += [torch.equal(run(x), prepared(x)) for x in xs.values()]
        compiled = "equal" if all(same) else "DIFFERS"
        bad |= set() if all(same) else {"compiled"}
    prepared.zero_grad()
    r = prepared.prepared.recipe
    backends = explain(Request(r.contract, r.fprop_input, r.fprop_weight, device, BF16, M_GRAD, N, K))
    gemm = next(backend for backend, said in backends if said == "runs")
    deployed: Any = copy.deepcopy(model)
    cells, verdict = ["-"] * len(ms), "OK"
    with torch.no_grad():
        ys = [prepared(x) for x in xs.values()]
        bad |= set() if all(y.isfinite().all() for y in ys) else {"not finite"}
        try:
            quantize_(deployed, QATConfig(step="convert"))
            dbs = [sqnr(y, deployed(x)) for y, x in zip(ys, xs.values(), strict=True)]
            cells = ["equal" if db == float("inf") else f"{db:.1f} dB" for db in dbs]
            bad |= set() if min(dbs) >= BOUND else {"SQNR"}
        except (ValueError, *MISSING_KERNEL) as error:  # a layout that cannot be packed here is a ValueError
            verdict = f"not run: {str(error).splitlines()[0]}"
    verdict = f"FAIL: {', '.join(sorted(bad))}" if bad else verdict
    packed = deployed[0].weight.data
    kind = type(packed).__name__ if is_packed(packed) else "-"
    return name, kind, gemm, *cells, *(f"{c:.4f}" for c in cosines), compiled, verdict


def main() -> int:
    """Print the table; 1 if any line says FAIL."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--out", type=Path, help="write the table here")
    args = parser.parse_args()

    start, device = time.perf_counter(), torch.device(args.device)
    meta, ms = versions(device), MS if args.device == "cuda" else MS[:-1]  # large M takes minutes on a CPU
    head = ("config", "weight", "gemm", *(f"M={m}" for m in ms), "cos dW", "cos dx", "compiled", "")
    names = [*(r.name for r in list_recipes() if not (r.experts or r.kv_cache)), *TORCHAO]
    if args.workers > 1:
        with ProcessPoolExecutor(args.workers, mp_context=get_context("spawn")) as pool:
            rows = [head, *pool.map(line, names, repeat(device), repeat(ms))]
    else:
        rows = [head, *(line(name, device, ms) for name in names)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [*(f"{key:12}{value}" for key, value in meta.items()), "", f"bf16, N = {N}, K = {K}, bias", ""]
    lines += ["  ".join(cell.ljust(w) for cell, w in zip(r, widths, strict=True)).rstrip() for r in rows]
    failed = sum(r[-1].startswith("FAIL") for r in rows)
    lines += ["", f"{len(rows) - 1} configs, {failed} failures; {time.perf_counter() - start:.0f} s"]
    print("\n".join(lines))
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        gpu = meta["gpu"].removeprefix("NVIDIA ").lower().replace(" ", "-") if args.device == "cuda" else "cpu"
        (args.out / f"parity_{gpu}.txt").write_text("\n".join(lines) + "\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
