"""The table of exactness: config x shape x M -> how far a prepared layer is from the converted one, with the kernels
that deploy.

    python benchmarks/exactness.py [CONFIG ...] [--out DIR]

Needs a CUDA device; MSLK's rows need a Hopper GPU and `mslk-cuda`. Two minutes. Writes
`benchmarks/results/exactness_<gpu>.txt`.

One bf16 layer with bias for each shape. The converted layer of torchao's configs is made by torchao's own `quantize_`;
that of aoquant's recipes by ours. A cell is "=" where every element is equal, else the SQNR of prepared against
converted in dB; "raises" where the converted layer does.

    routed       the backend that the router takes, as users train
    reference    the same layer in plain PyTorch, float32 sums: what a machine without the kernel computes
    other bytes  where torchao's own `quantize_` stores other codes than ours here (with mslk installed it takes MSLK's
                 quantiser for weights of Float8WeightOnlyConfig), "routed" is against ours, and this against torchao's
    torchao      torchao's own prepare against its own convert, where it has one, at the M's of the table

The exit code is 1 unless every routed cell is "=" or "raises".
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torchao.prototype.mx_formats as mx
import torchao.quantization as ao
from record_golden import versions
from torch import Tensor, nn
from torchao.quantization import quantize_ as torchao_quantize_
from torchao.quantization.qat import QATConfig as TorchaoQATConfig
from torchao.quantization.quantize_.common import KernelPreference

from aoquant import QATConfig, backend, calibrate, explain, quantize_
from aoquant.linear.tensor import same_bits
from aoquant.ops import Request
from aoquant.recipes import list_recipes
from aoquant.report.measure import sqnr

BF16, CUDA = torch.bfloat16, torch.device("cuda")
MS = (1, 16, 64, 512, 2048)
SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336), (2048, 1024))  # N, K
FP8, EMULATED = torch.float8_e4m3fn, KernelPreference.EMULATED
FP4 = torch.float4_e2m1fn_x2
TORCHAO: dict[str, Any] = {
    "Int4WeightOnly plain": ao.Int4WeightOnlyConfig(),
    "Int4WeightOnly plain g64": ao.Int4WeightOnlyConfig(group_size=64),
    "Int4WeightOnly preshuffled": ao.Int4WeightOnlyConfig(int4_packing_format="preshuffled"),
    "Int4WeightOnly tile-packed": ao.Int4WeightOnlyConfig(int4_packing_format="tile_packed_to_4d"),
    "Float8DynInt4 preshuffled": ao.Float8DynamicActivationInt4WeightConfig(int4_packing_format="preshuffled"),
    "Float8DynInt4 plain": ao.Float8DynamicActivationInt4WeightConfig(int4_packing_format="plain"),
    "Float8Dyn row": ao.Float8DynamicActivationFloat8WeightConfig(
        granularity=ao.PerRow(), kernel_preference=KernelPreference.TORCH
    ),
    "Float8Dyn row MSLK": ao.Float8DynamicActivationFloat8WeightConfig(
        granularity=ao.PerRow(), kernel_preference=KernelPreference.MSLK
    ),
    "Float8Dyn tensor": ao.Float8DynamicActivationFloat8WeightConfig(
        granularity=ao.PerTensor(), kernel_preference=KernelPreference.TORCH
    ),
    "Int8Dyn": ao.Int8DynamicActivationInt8WeightConfig(),
    "Int8DynIntx int4 g32": ao.Int8DynamicActivationIntxWeightConfig(torch.int4, ao.PerGroup(32)),  # type: ignore[attr-defined]
    "IntxWeightOnly int4 g32": ao.IntxWeightOnlyConfig(torch.int4, ao.PerGroup(32)),  # type: ignore[attr-defined]
    "Int8WeightOnly row": ao.Int8WeightOnlyConfig(granularity=ao.PerRow(), version=2),
    "Float8WeightOnly row": ao.Float8WeightOnlyConfig(granularity=ao.PerRow()),
    "MX mxfp8 emulated": mx.MXDynamicActivationMXWeightConfig(32, FP8, FP8, kernel_preference=EMULATED),
    "MX mxfp4 emulated": mx.MXDynamicActivationMXWeightConfig(32, FP4, FP4, kernel_preference=EMULATED),
    "NVFP4WeightOnly": mx.NVFP4WeightOnlyConfig(),
}


def layer(n: int, k: int) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(k, n, dtype=BF16, device=CUDA))
    with torch.no_grad():
        model[0].weight.copy_(torch.randn(n, k, device=CUDA) / k**0.5)
    return model


def outputs(model: nn.Module, xs: list[Tensor]) -> list[Tensor | None]:
    """model(x) for each x; None where a kernel raises."""
    found: list[Tensor | None] = []
    for x in xs:
        try:
            found.append(model(x))
        except RuntimeError:  # cuBLAS: some shapes have no kernel with a bias
            found.append(None)
    return found


def cells(want: list[Tensor | None], model: nn.Module, xs: list[Tensor], name: str = "") -> list[str]:
    """A cell for each M: model(x) against `want`, on backend `name`, by default whatever the router takes."""
    with backend(name) if name else nullcontext():
        ys = [model(x) for x in xs]
    return [
        "raises" if z is None else "=" if torch.equal(y, z) else f"{sqnr(z, y):.1f}"
        for y, z in zip(ys, want, strict=True)
    ]


def torchaos_own(config: Any, model: nn.Sequential, want: list[Tensor | None], xs: list[Tensor]) -> list[str]:
    """torchao's prepare against its own convert."""
    prepared = copy.deepcopy(model)
    try:
        torchao_quantize_(prepared, TorchaoQATConfig(config, step="prepare"))
        return cells(want, prepared, xs)
    except Exception as error:  # it refuses what it cannot prepare, in several ways
        return ["refused" if isinstance(error, ValueError) else type(error).__name__, *["-"] * (len(xs) - 1)]


@torch.no_grad()
def measure(config: Any, n: int, k: int, theirs: bool) -> tuple[str, dict[str, list[str]]]:
    """(backend that runs M = 16, row name -> cells)."""
    model = layer(n, k)
    other = copy.deepcopy(model)
    if theirs:
        torchao_quantize_(other, config)
    prepared: Any = copy.deepcopy(model)
    quantize_(prepared, QATConfig(config))
    if not prepared[0].calibrated:
        calibrate(prepared, [torch.randn(64, k, dtype=BF16, device=CUDA)])
    deployed = copy.deepcopy(prepared)
    quantize_(deployed, QATConfig(step="convert"))
    xs = [torch.randn(m, k, dtype=BF16, device=CUDA) for m in MS]
    same = theirs and same_bits(deployed[0].weight.data, other[0].weight.data)
    want = outputs(other if same else deployed, xs)
    r = prepared[0].prepared.recipe
    rows = explain(Request(r.contract, r.fprop_input, r.fprop_weight, CUDA, BF16, 16, n, k))
    lines = {"routed": cells(want, prepared, xs), "reference": cells(want, prepared, xs, "reference")}
    if theirs and not same:
        lines["other bytes"] = cells(outputs(other, xs), prepared, xs)
    if theirs:
        lines["torchao"] = torchaos_own(config, model, outputs(other, xs), xs)
    return next(name for name, said in rows if said == "runs"), lines


def main() -> int:
    """Print the table; 1 unless every routed cell is equal, or has nothing to be equal to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="*", help="default: all")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no CUDA device")
    warnings.simplefilter("ignore")
    start, failed = time.perf_counter(), 0
    lines = [f"{key:12}{value}" for key, value in versions(CUDA).items()]
    lines += ["", f"{'config':28}{'N x K':15}{'':12}" + "".join(f"{f'M={m}':8}" for m in MS) + "kernel"]
    print("\n".join(lines), flush=True)
    ours = {
        r.name: r.make()
        for r in list_recipes()
        if not (r.experts or r.kv_cache) and not r.name.startswith("torchao") and "static" not in r.name
    }
    both = {
        **{c: (config, True) for c, config in TORCHAO.items()},
        **{c: (config, False) for c, config in ours.items()},
    }
    for name in args.configs or both:
        config, theirs = both[name]
        for n, k in SHAPES:
            try:
                kernel, rows = measure(config, n, k, theirs)
            except Exception as error:
                kernel, rows = (
                    f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}",
                    {"not run": ["-"] * len(MS)},
                )
            failed += any(cell not in ("=", "raises") for cell in rows.get("routed", ["-"]))
            new = [
                f"{name if i == 0 else '':28}{f'{n} x {k}' if i == 0 else '':15}{row:12}"
                + "".join(f"{cell:8}" for cell in found)
                + (kernel if i == 0 else "")
                for i, (row, found) in enumerate(rows.items())
            ]
            print("\n".join(new), flush=True)
            lines += [line.rstrip() for line in new]
    lines += ["", f"{len(both)} configs, {failed} rows not equal; {time.perf_counter() - start:.0f} s"]
    print(lines[-1])
    args.out.mkdir(parents=True, exist_ok=True)
    gpu = torch.cuda.get_device_name().removeprefix("NVIDIA ").lower().replace(" ", "-")
    (args.out / f"exactness_{gpu}.txt").write_text("\n".join(lines) + "\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
