"""A training step of one layer, eager and compiled, beside nn.Linear and torchao's own QAT: `run.py`'s suite "layer".

A step is forward and backward of one linear layer, 8192 tokens. The variants of a group (what computes the same format)
are interleaved with nn.Linear, so that a ratio is taken within the rounds that it is about. "compiled" is
`torch.compile` in its default mode, and for our layers as one graph. More numbers beside the time:

    cpu_ms        what the host needs to issue a step while the GPU is behind: without CUDA graphs no step is faster
    isolated_ms   a step that starts on an idle GPU and waits for it: the time with a part of cpu_ms in it
    peak_MiB      what a step allocates at most, beyond what lived before it
    one_thread_*  time, ratio and cpu_ms again, with backward in the thread that calls it instead of PyTorch's own
                  (`torch.autograd.set_multithreading_enabled(False)`), for nn.Linear too

Nothing is timed unless prepared layers equal converted ones, and compiled steps eager ones, bit for bit: y, dx and dW.
torchao's QAT runs where it runs; elsewhere the row says what it raised. Its MX formats have an emulation, which is what
trains on Hopper.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from host import host_seconds, plain, step
from run import BF16, CUDA, Row, interleaved, percentiles, same
from torch import Tensor, nn
from torchao.prototype.mx_formats import MXDynamicActivationMXWeightConfig, NVFP4DynamicActivationNVFP4WeightConfig
from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow
from torchao.quantization import quantize_ as torchao_quantize_
from torchao.quantization.qat import QATConfig as TorchaoQATConfig
from torchao.quantization.quantize_.common import KernelPreference

from aoquant import QATConfig, quantize_
from aoquant.recipes import get_recipe

SHAPES = ((4096, 4096), (4096, 14336))  # K, N
TOKENS = 8192
STEPS = 8  # of a measurement of the host


def emulated(element: torch.dtype) -> Any:
    """torchao's MX config without its Blackwell GEMM, which needs a keyword that the constructor does not take."""
    config = MXDynamicActivationMXWeightConfig(activation_dtype=element, weight_dtype=element)
    return replace(config, kernel_preference=KernelPreference.EMULATED)


# group -> (our recipes, torchao's config that is prepared by torchao)
GROUPS: dict[str, tuple[tuple[str, ...], Callable[[], Any] | None]] = {
    "nn.Linear": ((), None),
    "int4-g128": (("int4-g128", "torchao-int4-g128"), lambda: get_recipe("torchao-int4-g128").make()),
    "int8-int4": (("int8-int4", "torchao-int8-int4"), lambda: get_recipe("torchao-int8-int4").make()),
    "mxfp4": (("mxfp4",), lambda: emulated(torch.float4_e2m1fn_x2)),
    "mxfp8": (("mxfp8",), lambda: emulated(torch.float8_e4m3fn)),
    "nvfp4": (("nvfp4",), NVFP4DynamicActivationNVFP4WeightConfig),
    "fp8-row": (("torchao-fp8",), lambda: Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())),
}
RECIPES = tuple(name for ours, _ in GROUPS.values() for name in ours)


def prepared(recipe: str, k: int, n: int) -> nn.Module:
    """The layer under one of our recipes."""
    model = plain(k, n)
    quantize_(model, QATConfig(get_recipe(recipe).make()))
    return model


def prepared_by_torchao(make: Callable[[], Any], k: int, n: int) -> nn.Module:
    """The layer as torchao prepares it."""
    model = plain(k, n)
    torchao_quantize_(model, TorchaoQATConfig(make(), step="prepare"))
    return model


def gate(recipe: str) -> bool:
    """Whether prepared equals converted, with a kernel that is installed here."""
    model = prepared(recipe, 1024, 512)
    x = torch.randn(256, 1024, device=CUDA, dtype=BF16)
    with torch.no_grad():
        y = model(x)
        quantize_(model, QATConfig(get_recipe(recipe).make(), step="convert"))
        try:
            return same(model(x), y)
        except (ImportError, NotImplementedError, AttributeError, ValueError) as error:
            print(f"  {recipe}: converted layer not run here ({reason(error)})")
            return True


def reason(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0][:90]}"


def results(model: nn.Module, x: Tensor, g: Tensor) -> list[Any]:
    """y, dx, dW."""
    return [step(model, x, g), x.grad, *(p.grad for p in model.parameters())]


def variants(
    group: str, k: int, n: int, x: Tensor, g: Tensor, peers: Sequence[str]
) -> tuple[dict[tuple[str, str], nn.Module], list[Row]]:
    """(what is timed in a group: by name and "eager" or "compiled", compiled and warm already; rows of what raised).

    peers: how torchao's QAT runs, "eager" or "compiled" or both.

    Raises:
        RuntimeError: a compiled step of ours is not its eager step.
    """
    torch._dynamo.reset()  # a code object has a limited number of compiled forms, and all layers share theirs
    ours, peer = GROUPS[group]
    found: dict[tuple[str, str], nn.Module] = {("nn.Linear", "eager"): plain(k, n)}
    failed: list[Row] = []
    if not ours:
        found["nn.Linear", "compiled"] = torch.compile(plain(k, n), fullgraph=True)  # type: ignore[assignment]
    for name in ours:
        model = prepared(name, k, n)
        found[name, "eager"] = model
        found[name, "compiled"] = torch.compile(model, fullgraph=True)  # type: ignore[assignment]
        want = results(model, x, g)
        for got, value in zip(results(found[name, "compiled"], x, g), want, strict=True):
            if not same(got, value):
                raise RuntimeError(f"the exactness gate is red: {name}, K{k} N{n}: compiled is not eager")
    for how in peers if peer else ():
        name = f"torchao's QAT, {group}"
        assert peer is not None
        try:
            model = prepared_by_torchao(peer, k, n)
            found[name, how] = model if how == "eager" else torch.compile(model)  # type: ignore[assignment]
            step(found[name, how], x, g)
        except Exception as error:  # it raises in several ways
            found.pop((name, how), None)
            failed.append({"variant": name, "how": how, "note": reason(error)})
    for model in found.values():
        for _ in range(2):
            step(model, x, g)
    torch.cuda.synchronize()
    return found, failed


def host_ms(run: Callable[[], Any]) -> float:
    """Return the host's milliseconds for a step, the median of five series."""
    return percentiles([host_seconds(run, STEPS, CUDA) * 1e3 for _ in range(5)])[1]


def isolated_ms(run: Callable[[], Any], rounds: int) -> float:
    """Milliseconds of a step between two waits for the GPU, the median."""
    times = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return percentiles(times)[1]


def peak_mib(run: Callable[[], Any]) -> float:
    """What a step allocates at most, in MiB, beyond what lived before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def measure(rounds: int, quick: bool = False) -> list[Row]:
    """Every group and shape; ratio to the eager nn.Linear of the same rounds. quick: torchao's layers are compiled for
    one shape.
    """
    rows: list[Row] = []
    for k, n in SHAPES:
        x = torch.randn(TOKENS, k, device=CUDA, dtype=BF16).requires_grad_()
        g = torch.randn(TOKENS, n, device=CUDA, dtype=BF16)
        for group in GROUPS:
            peers = ("eager",) if quick and (k, n) != SHAPES[0] else ("eager", "compiled")
            models, failed = variants(group, k, n, x, g, peers)
            runs = {" ".join(key): (lambda m=m: step(m, x, g)) for key, m in models.items()}  # type: ignore[misc]  # noqa: B023
            times = interleaved(runs, rounds)
            reference = percentiles(times["nn.Linear eager"])[1]
            with torch.autograd.set_multithreading_enabled(False):
                alone = {name: percentiles(t)[1] for name, t in interleaved(runs, rounds).items()}
                alone_cpu = {name: host_ms(run) for name, run in runs.items()}
            same_everywhere = {"suite": "layer", "shape": f"K{k} N{n}", "group": group}
            for name, how in models:
                key = f"{name} {how}"
                run, (p20, p50, p80) = runs[key], percentiles(times[key])
                rows.append({**same_everywhere, "variant": name, "how": how, "ms_p20": p20, "ms_p50": p50, "ms_p80": p80,
                             "ratio": p50 / reference, "isolated_ms": isolated_ms(run, 15), "cpu_ms": host_ms(run),
                             "peak_MiB": peak_mib(run), "one_thread_ms": alone[key], "one_thread_ratio": alone[key] / alone["nn.Linear eager"],
                             "one_thread_cpu_ms": alone_cpu[key], "note": ""})  # fmt: skip
                print(
                    f"  K{k} N{n} {name} {how}: {p50:.3f} ms, {p50 / reference:.3f}; one thread {alone[key]:.3f} ms",
                    flush=True,
                )  # if a time limit ends the rest
            nothing = dict.fromkeys(rows[0], "")
            rows += [{**nothing, **same_everywhere, **row} for row in failed]
    return rows
