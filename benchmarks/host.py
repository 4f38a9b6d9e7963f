"""Is the host the limit? Host time of a quantised linear layer, and its step with and without a host, beside nn.Linear.

    python benchmarks/host.py [host] [graph] [--recipes ...] [--limit SECONDS] [--out FILE] [--quick]

One bf16 layer without bias. Everything runs in one process and in turns, and rows are appended to
benchmarks/results/host.csv:

    host     Microseconds that Python needs to issue a call, without waiting for the device: the least of 15 series of
             20 calls. A step is forward and backward, with gradients made anew. "no grad", "fixed weights" and "packed"
             take one row and no gradients. The device is done long before in small layers and late in large ones;
             neither changes this number.
    graph    Microseconds of a step, device included: the median of 15 rounds of 20 steps, from an idle device to an
             idle device. Eager, compiled (default mode), and as a CUDA graph, where no host can be late.

    autograd.Function is nn.Linear's three GEMMs in a function of Python's: the least that a step of a quantised layer
    costs.

    to_linear    the time over nn.Linear's: of a step, its eager step; of other calls, its call without gradients
    to_f_linear  the time over that of a bare `F.linear(x, weight)`, which pays no module call
    to_graph     the time over that of the same layer's CUDA graph

Without a GPU it runs on the CPU, where no row has a graph. --quick: tiny layers, few series, and no Inductor; its
numbers mean nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from beside import Deadline, Row, Run, Table, free, percentiles, reason, seconds, wait
from graphs import graphed
from torch import Tensor, nn
from torch.nn import functional as F

from aoquant import fixed_weights, quantize_
from aoquant.recipes import get_recipe

KINDS = ("host", "graph")
RECIPES = ("int4-g128", "nvfp4", "fp8", "mxfp4", "fp8-hybrid", "nvfp4-training")
LINEAR, FUNCTION = "nn.Linear", "autograd.Function"
STEP, NO_GRAD, FIXED, PACKED = "step", "no grad", "fixed weights", "packed"
HOWS = ("eager", "compiled", "graph")
BF16 = torch.bfloat16
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = ((1024, 1024, 16), (4096, 4096, 8192))  # K, N, rows of a step
QUICK = ((128, 128, 16),)
SERIES, REPEATS, WARM = 15, 20, 3
OUT_OF_TIME = "not run: out of time"
_OPEN = ExitStack()  # fixed weights, until the process ends
Calls = dict[tuple[str, str], Run]


class Product(torch.autograd.Function):
    """y (M, N) = x (M, K) W^T, and its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return dy @ w, dy.t() @ x


class Plain(nn.Linear):
    """nn.Linear by `Product`."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Product.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return y


def plain(k: int, n: int) -> nn.Sequential:
    """Return nn.Linear without bias in bf16, always with the same weight."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(k, n, bias=False, dtype=BF16, device=DEVICE))


def prepared(recipe: str, k: int, n: int) -> nn.Sequential:
    """Return the layer under a recipe, with the recipe's backward."""
    model = plain(k, n)
    if recipe != LINEAR:
        quantize_(model, get_recipe(recipe).prepare())
    return model


def step(model: nn.Module, x: Tensor, g: Tensor) -> Tensor:
    """Run forward and backward; gradients are made anew."""
    x.grad = None
    model.zero_grad()
    y: Tensor = model(x)
    y.backward(g)
    return y.detach()


def batch(k: int, n: int, rows: int) -> tuple[Tensor, Tensor]:
    """Return an input that needs its gradient, and a gradient of the output."""
    x = torch.randn(rows, k, dtype=BF16, device=DEVICE, requires_grad=True)
    return x, torch.randn(rows, n, dtype=BF16, device=DEVICE)


def host_seconds(run: Run, repeats: int, device: torch.device) -> float:
    """Return the host's time for one run. The first of a series is not timed: the device is behind from then on."""
    wait(device)
    run()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    taken = max(time.perf_counter() - start, 1e-6) / repeats  # as `seconds`
    wait(device)
    return taken


def calls(recipes: Sequence[str], k: int, n: int, rows: int) -> tuple[Calls, list[Row]]:
    """Return (what host rows time, warm, by variant and call, nn.Linear and F.linear first; rows of what raised)."""
    x, g = batch(k, n, rows)
    one = torch.randn(1, k, dtype=BF16, device=DEVICE)
    linear = plain(k, n)[0]
    runs: Calls = {
        (LINEAR, STEP): partial(step, linear, x, g),
        (FUNCTION, STEP): partial(step, Plain(k, n, bias=False, dtype=BF16, device=DEVICE), x, g),
        (LINEAR, NO_GRAD): partial(linear, one),
        ("F.linear", NO_GRAD): partial(F.linear, one, linear.weight),
    }
    failed: list[Row] = []
    for recipe in recipes:
        try:
            layer, fixed, packed = prepared(recipe, k, n)[0], prepared(recipe, k, n), plain(k, n)
            _OPEN.enter_context(fixed_weights(fixed))
            quantize_(packed, get_recipe(recipe).make())
            found = {
                (recipe, STEP): partial(step, layer, x, g),
                (recipe, NO_GRAD): partial(layer, one),
                (recipe, FIXED): partial(fixed[0], one),
                (recipe, PACKED): partial(packed[0], one),
            }
            for (_, call), run in found.items():
                with torch.set_grad_enabled(call == STEP):
                    run()
        except Exception as error:  # a kernel may be missing here: the other recipes go on
            failed.append(named("host", k, n, rows, recipe, "") | {"note": reason(error)})
        else:
            runs |= found
    for (_, call), run in runs.items():
        with torch.set_grad_enabled(call == STEP):
            for _ in range(WARM):
                run()
    return runs, failed


def host_rows(runs: Calls, shape: tuple[int, int, int], series: int = SERIES) -> list[Row]:
    """Return the rows of `calls`: the least of some series, all calls in turns."""
    times: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
    for _ in range(series):
        for key, run in runs.items():
            with torch.set_grad_enabled(key[1] == STEP):
                times[key].append(host_seconds(run, REPEATS, DEVICE) * 1e6)
    us = {key: min(values) for key, values in times.items()}
    k, n, rows = shape
    return [
        {
            **named("host", k, n, rows if call == STEP else 1, variant, call),
            "us": value,
            "to_linear": value / us[LINEAR, STEP if call == STEP else NO_GRAD],
            "to_f_linear": "" if call == STEP else value / us["F.linear", NO_GRAD],
        }
        for (variant, call), value in us.items()
    ]


def named(kind: str, k: int, n: int, rows: int, variant: str, call: str) -> Row:
    """Return a row without numbers."""
    words = {"kind": kind, "shape": f"K{k} N{n}", "rows": rows, "variant": variant, "call": call}
    return words | dict.fromkeys(("us", "to_linear", "to_f_linear", "to_graph", "note"), "")


def ready(variant: str, how: str, k: int, n: int, rows: int, backend: str) -> Run:
    """Return a warm step. A graph is of the eager step."""
    model: Any = prepared(variant, k, n)[0]
    if how == "compiled":
        model = torch.compile(model, fullgraph=True, backend=backend)
    run = partial(step, model, *batch(k, n, rows))
    if how == "graph":
        return graphed(run, WARM)
    for _ in range(WARM):
        run()
    return run


def steps(
    recipes: Sequence[str], shape: tuple[int, int, int], backend: str, deadline: Deadline
) -> tuple[Calls, list[Row]]:
    """Return (what graph rows time, by variant and how; rows of what raised or came too late)."""
    # All layers share one code object, whose compiled forms are limited.
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 4 * (1 + len(recipes))
    runs: Calls = {}
    failed: list[Row] = []
    for variant in (LINEAR, *recipes):
        for how in HOWS if DEVICE.type == "cuda" else HOWS[:2]:
            row = named("graph", *shape, variant, how)
            if deadline.passed:
                failed.append(row | {"note": OUT_OF_TIME})
                continue
            try:
                runs[variant, how] = ready(variant, how, *shape, backend)
            except Exception as error:  # a compiler or a capture may raise anything: the other rows go on
                failed.append(row | {"note": reason(error)})
    return runs, failed


def graph_rows(runs: Calls, shape: tuple[int, int, int], rounds: int = SERIES) -> list[Row]:
    """Return the rows of `steps`: the median of some rounds, all runs in turns."""
    times: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
    for i in range(rounds):
        for key in list(runs)[:: 1 if i % 2 == 0 else -1]:
            times[key].append(seconds(runs[key], REPEATS, DEVICE) * 1e6)
    us = {key: percentiles(values)[1] for key, values in times.items()}

    def over(value: float, key: tuple[str, str]) -> float | str:
        return value / us[key] if key in us else ""

    return [
        {
            **named("graph", *shape, variant, how),
            "us": value,
            "to_linear": over(value, (LINEAR, "eager")),
            "to_graph": over(value, (variant, "graph")),
        }
        for (variant, how), value in us.items()
    ]


def host_of(recipes: Sequence[str], shape: tuple[int, int, int], series: int, deadline: Deadline) -> list[Row]:
    """Prepare and time the calls of a shape."""
    if deadline.passed:
        return [named("host", *shape, recipe, "") | {"note": OUT_OF_TIME} for recipe in recipes]
    runs, failed = calls(recipes, *shape)
    try:
        return host_rows(runs, shape, series) + failed
    finally:
        _OPEN.close()
        free(DEVICE)


def graph_of(
    recipes: Sequence[str], shape: tuple[int, int, int], rounds: int, backend: str, deadline: Deadline
) -> list[Row]:
    """Prepare and time the steps of a shape."""
    runs, failed = steps(recipes, shape, backend, deadline)
    return graph_rows(runs, shape, rounds) + failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", choices=[[], *KINDS], help="default: both")
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--limit", type=float, default=0, metavar="SECONDS", help="after this, nothing new begins")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results" / "host.csv")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    shapes, series = (QUICK, 2) if args.quick else (SHAPES, SERIES)
    table, deadline = Table(args.out, DEVICE), Deadline(args.limit)
    backend = "aot_eager" if args.quick else "inductor"
    for kind in args.kinds or KINDS:
        for shape in shapes if kind == "host" else shapes[-1:]:
            if kind == "host":
                rows = host_of(args.recipes, shape, series, deadline)
            else:
                rows = graph_of(args.recipes, shape, series, backend, deadline)
            for row in rows:
                table.add(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
