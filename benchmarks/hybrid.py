"""A training step of one layer with a cast for each operand, beside nn.Linear and torchao's Float8Linear: `run.py`'s
suite "hybrid".

    python benchmarks/run.py hybrid [--quick]

Forward and backward of one linear layer, 8192 tokens, bf16, all variants interleaved in the same rounds; `ratio` is to
the eager nn.Linear. torchao's tensorwise and rowwise recipes train with fp8 GEMMs in all three products, and so does
`fp8-hybrid`; the other mixes emulate all three.

    how               a step
    eager, compiled   as users run it; a small layer may wait for the host, which needs cpu_ms
    reduce-overhead   the CUDA graphs of `torch.compile(mode="reduce-overhead")`: the GPU's own time, a copy of x and dy
                      into the graphs' memory included, for nn.Linear too; no peak_MiB, since that memory is held

Nothing is timed unless prepared layers equal converted ones, and compiled and replayed steps eager ones, bit for bit:
y, dx and dW.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from host import plain, prepared, step
from layers import SHAPES, TOKENS, host_ms, peak_mib, reason, results
from run import BF16, CUDA, Row, interleaved, percentiles, same
from torch import nn
from torch._dynamo.utils import counters
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from aoquant import QATConfig, quantize_
from aoquant.linear.prepared import RANDOM

MIXES = ("fp8-hybrid", "mxfp8-nvfp4", "nvfp4-mxfp8", "nvfp4-training", "mxfp8-hp", "nvfp4-hp")
PEERS = ("tensorwise", "rowwise")
GRAPHS = "reduce-overhead"
HOWS = ("eager", "compiled", GRAPHS)
WARM = 3  # steps: a CUDA graph is recorded in the second


def gate(name: str) -> bool:
    """Whether prepared equals converted, and a compiled step the eager one."""
    model = prepared(name, 1024, 512)
    x = torch.randn(256, 1024, device=CUDA, dtype=BF16).requires_grad_()
    g = torch.randn(256, 512, device=CUDA, dtype=BF16)
    want = rewound(model, lambda: results(model, x, g))
    equal = True
    torch._dynamo.reset()  # all layers share their code, whose compiled forms are limited
    for how in HOWS[1:]:
        compiled = ready(model, how, fullgraph=True)
        for _ in range(WARM):
            got = rewound(model, lambda: results(compiled, x, g))  # noqa: B023
            equal &= all(same(a, b) for a, b in zip(got, want, strict=True))
    deployed = copy.deepcopy(model)
    quantize_(deployed, QATConfig(step="convert"))
    with torch.no_grad():
        return equal and same(deployed(x), want[0])


def ready(model: nn.Module, how: str, fullgraph: bool = False) -> Any:
    """The layer as it is run."""
    if how == "eager":
        return model
    return torch.compile(model, fullgraph=fullgraph, mode=GRAPHS if how == GRAPHS else None)


def rewound(model: nn.Module, run: Callable[[], list[Any]]) -> list[Any]:
    """`run()`, drawing the numbers of step 0."""
    for name, state in model.named_buffers():
        if name.endswith(RANDOM):
            state[2:].zero_()
    torch.compiler.cudagraph_mark_step_begin()
    return [t.clone() for t in run()]


def stepped(model: nn.Module, how: str, x: torch.Tensor, g: torch.Tensor) -> None:
    """A step; CUDA graphs are told that what the last one left may go."""
    if how == GRAPHS:
        torch.compiler.cudagraph_mark_step_begin()
    step(model, x, g)


def variants(k: int, n: int, x: torch.Tensor, g: torch.Tensor) -> tuple[dict[tuple[str, str], nn.Module], list[Row]]:
    """(what is timed, by name and how, compiled and warm; rows of what raised)."""
    makes: dict[str, Callable[[], nn.Module]] = {"nn.Linear": lambda: plain(k, n)}
    makes |= {name: lambda name=name: prepared(name, k, n) for name in MIXES}  # type: ignore[misc]
    for peer in PEERS:
        config = Float8LinearConfig.from_recipe_name(peer)
        makes[f"torchao {peer}"] = lambda config=config: convert_to_float8_training(plain(k, n), config=config)  # type: ignore[misc]
    found: dict[tuple[str, str], nn.Module] = {}
    failed: list[Row] = []
    # All layers share one code object, whose compiled forms are limited: beyond the limit a layer runs uncompiled. A
    # reset between two layers would compile the first again while it is timed.
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 4 * len(makes)
    for name, make in makes.items():
        for how in HOWS:
            model: Any = ready(make(), how)
            counters.clear()
            try:
                for _ in range(WARM):
                    stepped(model, how, x, g)
                if counters["inductor"]["cudagraph_skips"]:
                    raise RuntimeError("torch.compile skipped CUDA graphs")
            except Exception as error:
                failed.append({"variant": name, "how": how, "note": reason(error)})
                continue
            found[name, how] = model
    torch.cuda.synchronize()
    return found, failed


def measure(rounds: int) -> list[Row]:
    """Every variant at both shapes."""
    rows: list[Row] = []
    for k, n in SHAPES:
        x = torch.randn(TOKENS, k, device=CUDA, dtype=BF16).requires_grad_()
        g = torch.randn(TOKENS, n, device=CUDA, dtype=BF16)
        models, failed = variants(k, n, x, g)
        runs = {key: partial(stepped, m, key[1], x, g) for key, m in models.items()}
        times = interleaved({" ".join(key): run for key, run in runs.items()}, rounds)
        reference = percentiles(times["nn.Linear eager"])[1]
        everywhere = {"suite": "hybrid", "shape": f"K{k} N{n}"}
        for (name, how), run in runs.items():
            p20, p50, p80 = percentiles(times[f"{name} {how}"])
            rows.append({**everywhere, "variant": name, "how": how, "ms_p20": p20, "ms_p50": p50, "ms_p80": p80,
                         "ratio": p50 / reference, "cpu_ms": host_ms(run),
                         "peak_MiB": "" if how == GRAPHS else peak_mib(run), "note": ""})  # fmt: skip
            print(f"  K{k} N{n} {name} {how}: {p50:.3f} ms, {p50 / reference:.3f}", flush=True)  # if time runs out
        rows += [{**dict.fromkeys(rows[0], ""), **everywhere, **row} for row in failed]
    return rows
