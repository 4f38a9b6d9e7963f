"""Measure speed on one GPU: encoding, training steps of a layer, the packed layer at few and at many tokens.

    python benchmarks/run.py [encode] [layer] [hybrid] [decode] [--out DIR] [--quick]

Needs a CUDA device and Triton. Before anything is timed, the exactness gate runs: every format that is timed must give
the reference's bytes through the Triton kernels, and every layer that is timed must equal its converted self; else the
exit code is 1 and there are no numbers. The full proof is `make gpu-test`.

Variants of a row are interleaved, one round after another, so that a clock that drifts drifts for all of them; a time
is the median over rounds, with the 20th and 80th percentile beside it. Kernels are timed in CUDA graphs over inputs
rotated beyond the L2 cache; training steps run as users run them, eager and compiled, with CUDA events around each.
GB/s counts the bytes that have to move, each once, against the rate of a copy measured in the same rounds.
"""

from __future__ import annotations

import argparse
import csv
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from graphs import in_turns
from record_golden import versions
from torch import Tensor

from aoquant import backend, explain, get_format
from aoquant.formats import Encoded, Scales, as_operand, get_operand
from aoquant.ops import codec
from aoquant.ops.quantized import Ask

BF16, CUDA = torch.bfloat16, torch.device("cuda")
L2 = 64 << 20  # bytes, at least
ENCODE = (
    "nvfp4",
    "nvfp4-row",
    "nvfp4-static:0.001",
    "nvfp4-none",
    "mxfp4",
    "mxfp8",
    "int4-g128",
    "intx8-row-asym-native",
    "int8-row",
    "fp8-row",
    "fp8-tensor",
    "te-fp8-tensor",
    "te-fp8-1x128",
    "te-fp8-128x128",
    "mxfp8-32x32",
    "te-nvfp4-16x16",
)
# encoded only: what a fused transform adds to the encoding
TRANSFORMED = tuple(f"hadamard{size}+{inner}" for inner in ("nvfp4", "mxfp4") for size in (16, 32, 64, 128))
FITTED = (
    *(f"wush{size}+nvfp4" for size in (16, 32, 64, 128)),
    *(f"wush{size}+mxfp4" for size in (16, 64)),
    "wush16+int8-row",  # transformed by one kernel, encoded by another
)
WHOLE = ("nvfp4", "fp8-tensor")  # csrc encodes them in one launch; Triton's two are timed beside it
# encoders that try several scales, and what makes their outer scale a constant
GRIDS = {
    "fouroversix": "-static:0.125",
    "gridflip": "-static:0.125",
    "gridflip-sided": "-static:0.125",
    "gridflip-search": "-static:0.125",
    "nvfp4-search": "-static:0.0001",
}
TOKENS = 8192
SUITES = ("encode", "layer", "hybrid", "decode")
Row = dict[str, Any]


def percentiles(times: Sequence[float]) -> tuple[float, float, float]:
    """20th, 50th and 80th."""
    t = torch.tensor(times, dtype=torch.float64)
    p20, p50, p80 = (t.quantile(q).item() for q in (0.2, 0.5, 0.8))
    return p20, p50, p80


def interleaved(runs: dict[str, Callable[[], Any]], rounds: int, per_run: int = 1) -> dict[str, list[float]]:
    """Milliseconds of each run, `rounds` times in turn; one run does its work `per_run` times.

    Each round has another order, drawn once for all: a run that the host is late for waits less behind one that keeps
    the GPU busy for longer. It begins with an untimed run, so that nobody pays for a GPU that waits for its first
    launch.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for round_ in range(rounds + 3):
        events = []
        order = random.Random(round_).sample(names, len(names))
        runs[order[-1]]()
        for name in order:
            run = runs[name]
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            events.append((name, start, end))
        torch.cuda.synchronize()
        if round_ >= 3:
            for name, start, end in events:
                times[name].append(start.elapsed_time(end) / per_run)
    return times


def nbytes(*parts: Any) -> int:
    """Bytes of tensors and of encoded matrices."""
    tensors = [t for p in parts for t in (p[:4] if isinstance(p, Encoded) else [p]) if isinstance(t, Tensor)]
    return sum(t.numel() * t.element_size() for t in tensors)


def same(a: Any, b: Any) -> bool:
    """Bit-equal, tensors or encoded matrices."""
    if isinstance(a, Encoded):
        return all(same(x, y) for x, y in zip(a[:4], b[:4], strict=True))
    return (a is None and b is None) or torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def gate_format(name: str) -> bool:
    """Whether the kernels give the reference's bytes on a matrix with outliers and zeros."""
    fmt, ok = get_format(name), True
    x = torch.randn(512, 4096, device=CUDA) * torch.randn(512, 4096, device=CUDA).exp()
    x[::7, :256] = 0
    x = x.to(BF16)
    e = fmt.encode(x)
    for which in encoders(name):
        with backend(which):
            ok &= same(codec.encode(fmt, x), e)
            for operand in () if name in TRANSFORMED else (True, False):
                values = fmt.operand(e, BF16) if operand else fmt.decode(e, BF16)
                both = codec.quantize(as_operand(fmt), x, Ask(True, BF16, operand))
                ok &= same(both[0], e) and same(both[1], values)
                with backend("triton"):
                    ok &= same(codec.decode(fmt, e, BF16, operand=operand), values)
    return ok


def fitted(name: str, k: int) -> Tensor:
    """(K / size, size, size) float32 with bf16 entries, as calibration leaves them; its values cost nothing, so any
    will do.
    """
    transform = get_operand(name).transform
    assert transform is not None
    size = transform.size
    return (torch.randn(k // size, size, size, device=CUDA) / size**0.5).bfloat16().float()


def gate_fitted(name: str) -> bool:
    """Whether encoding with given matrices gives the reference's bytes."""
    x, matrix = torch.randn(512, 4096, device=CUDA, dtype=BF16), fitted(name, 4096)
    e = get_format(name).encode(x, Scales(transform=matrix))
    return same(codec.encode(get_operand(name), x, Scales(transform=matrix)), e)


def encoders(name: str) -> list[str]:
    """The kernels that encode a format here."""
    reasons = dict(explain(codec.CodecRequest("quantize", get_format(name), CUDA, BF16, 512, 4096)))
    return [which for which in ("cuda", "triton") if reasons[which] in ("runs", "willing, lower priority")]


def measure_encode(rounds: int) -> list[Row]:
    """Encode, decode and both in one pass, 8192 x 4096 bf16."""
    xs = [torch.randn(TOKENS, 4096, device=CUDA, dtype=BF16) for _ in range(4)]
    runs: dict[str, Callable[[], Any]] = {"copy": in_turns(lambda i: xs[i].clone(), len(xs))}
    moved = {"copy": 2 * nbytes(xs[0])}
    for name in ENCODE:
        fmt = get_format(name)
        encoded = [codec.encode(fmt, x) for x in xs]
        for what, run, size in (
            ("encode", lambda i, f=fmt: codec.encode(f, xs[i]), nbytes(xs[0], encoded[0])),
            (
                "quantize",
                lambda i, f=fmt: codec.quantize(as_operand(f), xs[i], Ask(True, BF16)),
                nbytes(xs[0], xs[0], encoded[0]),
            ),
            (
                "values",
                lambda i, f=fmt: codec.quantize(as_operand(f), xs[i], Ask(False, BF16, operand=False)),
                nbytes(xs[0], xs[0]),
            ),
            ("decode", lambda i, f=fmt, e=encoded: codec.decode(f, e[i], BF16), nbytes(xs[0], encoded[0])),
        ):
            runs[f"{what} {name}"], moved[f"{what} {name}"] = in_turns(run, len(xs)), size
    for name in TRANSFORMED:
        fmt = get_format(name)
        runs[f"encode {name}"] = in_turns(lambda i, f=fmt: codec.encode(f, xs[i]), len(xs))
        moved[f"encode {name}"] = nbytes(xs[0], codec.encode(fmt, xs[0]))
    for name in WHOLE:
        fmt, variant = get_format(name), f"encode {name} (triton)"
        with backend("triton"):
            runs[variant] = in_turns(lambda i, f=fmt: codec.encode(f, xs[i]), len(xs))
        moved[variant] = moved[f"encode {name}"]
    for name in FITTED:
        matrix = fitted(name, 4096)
        operand, held = get_operand(name), Scales(transform=matrix)
        runs[f"encode {name}"] = in_turns(lambda i, o=operand, h=held: codec.encode(o, xs[i], h), len(xs))
        moved[f"encode {name}"] = nbytes(xs[0], codec.encode(operand, xs[0], held))
    return rated(runs, moved, rounds, len(xs), f"{TOKENS}x4096")


def measure_grids(rounds: int) -> list[Row]:
    """Encoders that try several scales, 4096 x 4096 bf16, by each backend: with their own amax, and with a constant
    one.
    """
    xs = [torch.randn(4096, 4096, device=CUDA, dtype=BF16) * 0.02 for _ in range(8)]
    runs: dict[str, Callable[[], Any]] = {"copy": in_turns(lambda i: xs[i].clone(), len(xs))}
    moved = {"copy": 2 * nbytes(xs[0])}
    for name in (n + known for n, constant in GRIDS.items() for known in ("", constant)):
        fmt = get_format(name)
        for which in encoders(name):
            with backend(which):
                variant, run = f"encode {name} ({which})", lambda i, f=fmt: codec.encode(f, xs[i])
                runs[variant], moved[variant] = in_turns(run, len(xs)), nbytes(xs[0], codec.encode(fmt, xs[0]))
    return rated(runs, moved, rounds, len(xs), "4096x4096")


def rated(
    runs: dict[str, Callable[[], Any]], moved: dict[str, int], rounds: int, per_run: int, shape: str
) -> list[Row]:
    """Times of all runs, and their rates against the copy's."""
    times = interleaved(runs, rounds, per_run)
    ceiling = moved["copy"] / percentiles(times["copy"])[1]
    rows = []
    for name, ts in times.items():
        p20, p50, p80 = percentiles(ts)
        rate = moved[name] / p50
        rows.append({"suite": "encode", "shape": shape, "variant": name, "ms_p20": p20, "ms_p50": p50, "ms_p80": p80,
                     "GB/s": rate / 1e6, "of_copy": rate / ceiling})  # fmt: skip
    return rows


def main() -> int:
    """Print and write the rows; 1 on a red gate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", choices=[[], *SUITES], help="default: all")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    parser.add_argument(
        "--quick", action="store_true", help="fewer rounds, and torchao's layers compiled for one shape"
    )
    args = parser.parse_args()
    suites = args.suites or SUITES
    if not torch.cuda.is_available():
        print("benchmarks/run.py needs a CUDA device")
        return 1

    import decode  # they need this file's functions
    import hybrid
    import layers

    meta = versions(CUDA)
    red = [name for name in (*ENCODE, *TRANSFORMED, *GRIDS) if "encode" in suites and not gate_format(name)]
    red += [name for name in FITTED if "encode" in suites and not gate_fitted(name)]
    red += [name for name in layers.RECIPES if "layer" in suites and not layers.gate(name)]
    red += [name for name in hybrid.MIXES if "hybrid" in suites and not hybrid.gate(name)]
    red += [name for name in decode.FORMATS if "decode" in suites and not decode.gate(name)]
    if red:
        print(f"the exactness gate is red, nothing is timed: {', '.join(red)}")
        return 1
    print("exactness gate: green", flush=True)
    rows: list[Row] = []
    if "encode" in suites:
        rows += measure_encode(20 if args.quick else 100)
        rows += measure_grids(20 if args.quick else 100)
    if "layer" in suites:
        rows += layers.measure(20 if args.quick else 60, args.quick)
    if "hybrid" in suites:
        rows += hybrid.measure(20 if args.quick else 60)
    if "decode" in suites:
        rows += decode.measure(10 if args.quick else 40)
    for row in rows:
        print("  ".join(f"{v:.4f}" if isinstance(v, float) else f"{v:<26}" for v in row.values()))
    args.out.mkdir(parents=True, exist_ok=True)
    for suite in suites:
        mine = [{**meta, **row} for row in rows if row["suite"] == suite]
        with (args.out / f"speed_{suite}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(mine[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(mine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
