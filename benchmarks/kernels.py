"""Kernels beside those that they might replace, in one run: equal bytes first, then times.

    python benchmarks/kernels.py [encode] [decode]

encode: WUSH and formats with one scale for a tensor, 8192 x 4096 bfloat16, beside the reference and Triton. decode:
the packed GEMM's candidates (AOQUANT_DECODE_VARIANT, see csrc/decode_plan.cuh), 16 to 64 rows, against cuBLAS. Every
variant is a CUDA graph over inputs rotated beyond the L2 cache, interleaved with the others.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from decode import CALLS, SHAPES, multiply_one
from run import BF16, CUDA, FITTED, fitted, graph, interleaved, nbytes, percentiles, same

from aoquant import backend, get_format, ops
from aoquant.formats import Encoded, Scales, get_operand
from aoquant.ops import codec

ROUNDS = 30
ROWS = (16, 17, 32, 48, 64)
VARIANTS = ("0", "1", "2")


def encode() -> bool:
    """Whether all bytes are equal; prints microseconds and the share of a copy's rate."""
    xs = [torch.randn(8192, 4096, device=CUDA, dtype=BF16) for _ in range(4)]
    runs: dict[str, Callable[[], Any]] = {"copy": graph(lambda i: xs[i].clone(), len(xs))}
    moved, green = {"copy": 2 * nbytes(xs[0])}, True
    for name in ("nvfp4", "fp8-tensor"):
        fmt = get_format(name)
        for which in ("triton", "cuda"):
            with backend(which):
                e = codec.encode(fmt, xs[0])
                green &= report(f"{name} {which}", same(e, fmt.encode(xs[0])))
                for what, call in (
                    ("encode", lambda i, f=fmt: codec.encode(f, xs[i])),
                    ("quantize", lambda i, f=fmt: codec.encode_with_values(f, xs[i], BF16, operand=True, keep=True)),
                    ("values", lambda i, f=fmt: codec.encode_with_values(f, xs[i], BF16)),
                ):
                    runs[f"{what} {name} {which}"] = graph(call, len(xs))
                    size = {
                        "encode": nbytes(xs[0], e),
                        "quantize": nbytes(xs[0], xs[0], e),
                        "values": nbytes(xs[0], xs[0]),
                    }
                    moved[f"{what} {name} {which}"] = size[what]
    for name in (*FITTED, "wush32+nvfp4", "wush128+nvfp4", "wush16+int8-row"):
        operand, held = get_operand(name), Scales(transform=fitted(name, 4096))
        with backend("reference"):
            want = ops.encode(xs[0], operand, held)
        got = ops.encode(xs[0], operand, held)
        report(
            f"{name}, {int((got.codes.view(torch.uint8) != want.codes.view(torch.uint8)).sum())} bytes differ",
            same(got, want),
        )
        green &= same(got, want)
        runs[f"encode {name}"] = graph(lambda i, o=operand, h=held: ops.encode(xs[i], o, h), len(xs))
        moved[f"encode {name}"] = nbytes(xs[0], got)
    operand, matrix = get_operand("wush16+nvfp4"), fitted("wush16+nvfp4", 4096)
    runs["transform wush16"] = graph(lambda i: codec.transform(operand, xs[i], matrix), len(xs))
    moved["transform wush16"] = 3 * nbytes(xs[0])
    times = interleaved(runs, ROUNDS, len(xs))
    copy = moved["copy"] / percentiles(times["copy"])[1]
    for name, ts in times.items():
        p50 = percentiles(ts)[1]
        print(f"{name:<32} {1e3 * p50:8.1f} us   {moved[name] / p50 / copy:.2f} of a copy", flush=True)
    return green


def report(what: str, equal: bool) -> bool:
    """Print it where bytes differ."""
    print(f"{'equal ' if equal else 'DIFFER'} {what}", flush=True)
    return equal


def decode() -> bool:
    """Whether candidates agree with variant 0, or nearly; prints microseconds and cuBLAS's time over theirs."""
    green = True
    for k, n in SHAPES:
        w = (torch.randn(n, k, device=CUDA) * 0.02).to(BF16)
        ws = [w.clone() for _ in range(max(2, -(-(130 << 20) // (2 * n * k))))]
        weights = {}
        for name in ("int4-g128", "nvfp4"):
            e = codec.encode(get_format(name), w)
            copies = -(-(130 << 20) // nbytes(e))
            weights[name] = [Encoded(*(None if t is None else t.clone() for t in e[:4]), k) for _ in range(copies)]  # type: ignore[arg-type]
        for m in ROWS:
            x = torch.randn(m, k, device=CUDA, dtype=BF16)
            runs: dict[str, Callable[[], Any]] = {}
            per: dict[str, int] = {}
            per["cublas"] = len(ws) * max(1, CALLS // len(ws))
            runs["cublas"] = graph(lambda i, x=x, ws=ws: torch.mm(x, ws[i % len(ws)].t()), per["cublas"])  # type: ignore[misc]
            for name, es in weights.items():
                want = None
                for variant in VARIANTS:
                    os.environ["AOQUANT_DECODE_VARIANT"] = variant
                    y = multiply_one(name, es, x, 0)
                    want = y if want is None else want
                    if not torch.equal(y, want):
                        far = ((y - want).double().norm() / want.double().norm()).item()
                        print(f"not equal: {name} K{k} N{n} M{m} variant {variant}: {far:.1e}", flush=True)
                        green &= far < 4e-3
                    label = f"{name} {variant}"
                    per[label] = len(es) * max(1, CALLS // len(es))
                    runs[label] = graph(partial(multiply_one, name, es, x), per[label])
            times = {name: percentiles([t / per[name] for t in ts])[1] for name, ts in interleaved(runs, 10).items()}
            print(
                f"K{k} N{n} M{m}: "
                + "  ".join(f"{v} {1e3 * t:.2f} ({times['cublas'] / t:.2f})" for v, t in times.items()),
                flush=True,
            )
    os.environ.pop("AOQUANT_DECODE_VARIANT", None)
    return green


if __name__ == "__main__":
    suites = {"encode": encode, "decode": decode}
    chosen = sys.argv[1:] or ["encode", "decode"]
    sys.exit(0 if all([suites[suite]() for suite in chosen]) else 1)  # noqa: C419 - all of them run
