"""The process that benchmarks/compare.py starts in each checkout: it measures that checkout's aoquant.

The measurements are those of the checkout's own benchmarks/*.py, because operations may have other arguments there.

It answers commands from standard input, a line of JSON each: "where" (the checkout that it imported), "chunks" (what
there is to measure), "prepare" (compile and capture one chunk), "measure" (its rows).
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

HOST_RECIPES = ("int4-g128", "nvfp4-weight", "nvfp4", "fp8", "int8", "mxfp4", "fp8-hybrid")
Row = dict[str, Any]
Chunk = tuple[str, ...]
_GIVEN: dict[tuple[str, str], Any] = {}
_OPEN = ExitStack()  # blocks that last as long as the process


def chunks(suites: list[str]) -> list[Chunk]:
    """What is prepared and measured together.

    ("layer", group, number of the shape), ("decode", number of the shape), ("encode", which), ("host", recipe).
    """
    found: list[Chunk] = []
    if "layer" in suites:
        import layers

        found += [
            ("layer", g, str(i)) for g, (ours, _) in layers.GROUPS.items() if ours for i in range(len(layers.SHAPES))
        ]
    if "decode" in suites:
        import decode

        found += [("decode", str(i)) for i in range(len(decode.SHAPES))]
    if "encode" in suites:
        found += [("encode", "formats"), ("encode", "grids")]
    if "host" in suites:
        found += [("host", name) for name in HOST_RECIPES]
    return found


def given(module: ModuleType, name: str) -> Any:
    """What a module of the checkout called `name` before this file put something else there."""
    return _GIVEN.setdefault((module.__name__, name), getattr(module, name))


def measure_of(chunk: Chunk, quick: bool) -> Callable[[], list[Row]]:
    """Prepare a chunk; what measures it, as often as it is called."""
    suite, *rest = chunk
    if suite == "layer":
        return _layer(rest[0], int(rest[1]))
    if suite == "decode":
        import decode

        decode.SHAPES = (given(decode, "SHAPES")[int(rest[0])],)
        decode.peers = lambda *_: {}  # other people's kernels have not changed
        decode.measure(1)
        return lambda: decode.measure(10)
    if suite == "encode":
        import run

        which = run.measure_encode if rest[0] == "formats" else run.measure_grids
        which(1)
        return lambda: which(20)
    return _host(rest[0], quick)


def _layer(group: str, shape: int) -> Callable[[], list[Row]]:
    """The layers are compiled once and measured again and again."""
    import layers

    ours, _ = given(layers, "GROUPS")[group]
    layers.GROUPS, layers.SHAPES = {group: (ours, None)}, (given(layers, "SHAPES")[shape],)
    make, made = given(layers, "variants"), []

    def once(*args: Any) -> Any:
        if not made:
            made.append(make(*args))
        return made[0]

    layers.variants = once
    layers.measure(1)
    return lambda: layers.measure(20)


def _host(recipe: str, quick: bool) -> Callable[[], list[Row]]:
    """Microseconds of Python for one row of a packed layer and of a prepared one, and for its step with 16 rows."""
    import torch
    from torch import nn

    from aoquant import fixed_weights, quantize_
    from aoquant.recipes import get_recipe

    device, size = ("cuda" if torch.cuda.is_available() else "cpu"), 128 if quick else 1024
    new = {"bias": False, "dtype": torch.bfloat16, "device": device}
    packed, prepared, fixed = (nn.Sequential(nn.Linear(size, size, **new)) for _ in range(3))
    quantize_(packed, get_recipe(recipe).make())
    quantize_(prepared, get_recipe(recipe).prepare())
    quantize_(fixed, get_recipe(recipe).prepare())
    _OPEN.enter_context(fixed_weights(fixed))
    one = torch.randn(1, size, dtype=torch.bfloat16, device=device)
    x = torch.randn(16, size, dtype=torch.bfloat16, device=device, requires_grad=True)
    g = torch.randn(16, size, dtype=torch.bfloat16, device=device)

    def forward() -> None:
        with torch.no_grad():
            packed(one)

    def evaluation() -> None:
        with torch.no_grad():
            prepared(one)

    def rollout() -> None:
        with torch.no_grad():
            fixed(one)

    def step() -> None:
        x.grad = None
        prepared.zero_grad()
        prepared(x).backward(g)

    named = {
        "packed F.linear": forward,
        "prepared, no grad": evaluation,
        "prepared, fixed weights": rollout,
        "prepared, step": step,
    }

    def timed(call: Callable[[], None]) -> float:
        for _ in range(3):
            call()
        series = []
        for _ in range(5):
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(20):
                call()
            series.append((time.perf_counter() - start) / 20 * 1e6)
        return statistics.median(series)

    shape = f"K{size} N{size}"
    return lambda: [
        {"suite": "host", "shape": shape, "variant": f"{recipe}: {name}", "us_p50": timed(call)}
        for name, call in named.items()
    ]


def work() -> int:
    """Answer commands from standard input until it ends; what the benchmarks print goes to stderr."""
    measure: Callable[[], list[Row]] | None = None
    for line in sys.stdin:
        command = json.loads(line)
        try:
            with redirect_stdout(sys.stderr):
                if "where" in command:
                    import aoquant

                    answer: Any = str(Path(aoquant.__file__).resolve().parents[1])
                elif "chunks" in command:
                    answer = chunks(command["chunks"])
                elif "prepare" in command:
                    measure, answer = None, None
                    measure = measure_of(tuple(command["prepare"]), command["quick"])
                else:
                    assert measure is not None
                    answer = measure()
            print(json.dumps({"answer": answer}), flush=True)
        except Exception as error:
            print(json.dumps({"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(work())
