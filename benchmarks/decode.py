"""The packed layer's GEMM from one token to thousands, beside cuBLAS in bf16 and the kernels of others: `run.py`'s
suite "decode".

A variant is one CUDA graph of some `CALLS` calls, so that launching the graph does not count, over copies of the
weight, rotated beyond the L2 cache; the variants of a cell (shape, rows of x) are interleaved, and a ratio is cuBLAS's
time over theirs. Nothing is timed before the gate: one-hot rows must return the operand to the bit, in every range of
rows, and random ones lie within the bound of `test/gpu/test_decode.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from graphs import in_turns
from run import BF16, CUDA, Row, interleaved, nbytes, percentiles
from torch import Tensor

from aoquant import get_format
from aoquant.formats import Encoded, get_operand
from aoquant.ops import Request, codec, matmul
from aoquant.ops.gemm import mslk
from aoquant.ops.router import route

FORMATS = ("int4-g128", "nvfp4", "mxfp4", "gridflip")
SHAPES = ((4096, 4096), (4096, 14336), (14336, 4096))  # K, N
ROWS = (1, 4, 16, 32, 64, 256, 4096)
BEYOND_L2 = 130 << 20  # bytes, at least
CALLS = 40
GATE_ROWS = (1, 16, 32, 64, 256, 1024)


def multiply(name: str, e: Encoded, x: Tensor) -> Tensor:
    """The packed layer's GEMM, bf16 activations, no bias."""
    return matmul(x, e, None, None, get_operand(name), "aoquant", [x.shape[0]], BF16).y


def multiply_one(name: str, es: list[Encoded], x: Tensor, i: int) -> Tensor:
    """`multiply` by the next of some copies of a weight."""
    return multiply(name, es[i % len(es)], x)


def gate(name: str) -> bool:
    """Whether a format's GEMM is exact where it can be, and within the bound elsewhere, for every range of rows."""
    f, k, n = get_format(name), 2048, 512
    e = codec.encode(f, (torch.randn(n, k, device=CUDA) * 0.02).to(BF16))
    operand, alpha = f.operand(e, BF16), f.alpha(e)
    scale = 1.0 if alpha is None else alpha.double().t()
    ok = True
    for m in GATE_ROWS:
        eye = torch.eye(k, device=CUDA, dtype=BF16)[:m]
        want = operand[:, :m].t().float() * (1.0 if alpha is None else alpha.t())
        ok &= torch.equal(multiply(name, e, eye), want.to(BF16))
        x = torch.randn(m, k, device=CUDA, dtype=BF16)
        exact, size = x.double() @ operand.double().t() * scale, x.double().abs() @ operand.double().abs().t() * scale
        ok &= bool(
            (
                (multiply(name, e, x).double() - exact).abs() <= size * (k / 16 + 24) * 2.0**-23 + exact.abs() * 2.0**-8
            ).all()
        )
    return ok


def tinygemm(w: Tensor) -> tuple[Tensor, Tensor]:
    """A weight as `aten::_weight_int4pack_mm` takes it; any codes will do for a clock."""
    n, k = w.shape
    codes = torch.randint(0, 256, (n, k // 2), device=CUDA, dtype=torch.uint8)
    return torch._convert_weight_to_int4pack(codes, 8), torch.rand(k // 128, n, 2, device=CUDA).to(BF16)


def peers(m: int, x: Tensor, encoded: list[Encoded], ws: list[Tensor]) -> dict[str, Callable[[int], Any]]:
    """Other people's int4 kernels on the same shapes, where they are installed."""
    runs: dict[str, Callable[[int], Any]] = {}
    if m <= 256:
        packed = [tinygemm(ws[0]) for _ in encoded]
        runs["tinygemm int4"] = lambda i: torch._weight_int4pack_mm(
            x, packed[i % len(packed)][0], 128, packed[i % len(packed)][1]
        )
    if mslk.why_not_operator("bf16i4bf16_rowwise") is None:
        op = mslk.operator("bf16i4bf16_rowwise")
        held = [(e.codes.view(torch.int8), e.scale.t().contiguous(), e.zero.t().contiguous()) for e in encoded]  # type: ignore[union-attr]
        runs["mslk int4"] = lambda i: op(x, *held[i % len(held)])
    return runs


def measure(rounds: int) -> list[Row]:
    """Every format, shape and number of rows."""
    rows: list[Row] = []
    for k, n in SHAPES:
        w = (torch.randn(n, k, device=CUDA) * 0.02).to(BF16)
        ws = [w.clone() for _ in range(max(2, -(-BEYOND_L2 // (2 * n * k))))]
        encoded = {}
        for name in FORMATS:
            e = codec.encode(get_format(name), w)
            copies = -(-BEYOND_L2 // nbytes(e))
            encoded[name] = [Encoded(*(None if t is None else t.clone() for t in e[:4]), k) for _ in range(copies)]  # type: ignore[arg-type]
        for m in ROWS:
            x = torch.randn(m, k, device=CUDA, dtype=BF16)
            calls: dict[str, tuple[Callable[[int], Any], str, int]] = {
                "cublas bf16": (lambda i, x=x, ws=ws: torch.mm(x, ws[i % len(ws)].t()), "cublas", nbytes(w)),  # type: ignore[misc]
            }
            for name, es in encoded.items():
                backend = route(Request("aoquant", None, get_format(name), CUDA, BF16, m, n, k)).name
                run = partial(multiply_one, name, es, x)
                calls[name] = (run, backend, nbytes(es[0]))
            for name, call in peers(m, x, encoded["int4-g128"], ws).items():
                calls[name] = (call, "peer", nbytes(encoded["int4-g128"][0]))
            turns = {name: len(encoded.get(name, encoded["int4-g128"])) for name in calls} | {"cublas bf16": len(ws)}
            per = {name: n * max(1, CALLS // n) if m <= 256 else n for name, n in turns.items()}
            runs = {name: in_turns(call, per[name]) for name, (call, *_) in calls.items()}
            times = {name: [t / per[name] for t in ts] for name, ts in interleaved(runs, rounds).items()}
            plain = percentiles(times["cublas bf16"])[1]
            for name, (_, backend, size) in calls.items():
                p20, p50, p80 = (1e3 * t for t in percentiles(times[name]))
                moved = size + 2 * m * (n + k)
                rows.append({"suite": "decode", "shape": f"K{k} N{n}", "rows": m, "variant": name, "backend": backend, "us_p20": p20,
                             "us_p50": p50, "us_p80": p80, "ratio": 1e3 * plain / p50, "GB/s": moved / p50 / 1e3})  # fmt: skip
            del runs
    return rows
