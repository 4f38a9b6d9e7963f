"""Weak scaling: what FSDP2 sends for one decoder layer, and what that means for more GPUs than there are here.

    torchrun --nproc-per-node N benchmarks/scaling.py        # collectives, appended to results/communication.csv
    torchrun --nproc-per-node N benchmarks/model.py train    # steps of N = 1, 2, ... GPUs, in results/model_fsdp2.csv
    python benchmarks/publish.py                             # both files in docs/evidence/results.md

A step on P GPUs is projected as T(P) = max(T(1) + e C(P), C(P)). T(1) is the measured step of one GPU. C(P) is the time
of all messages of a step: two gathers of every layer's weights in forward and backward, and the scattered sum of its
gradients, at the bandwidth that such messages had here within a host, and at an assumed one between hosts. e is the
share of C that a step did not hide on the most GPUs that were measured: (T(N) - T(1)) / C(N), at least 0. Batches grow
with P; each GPU has as many tokens as here. What is left out is said below the table that is written.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from beside import Table
from llamas import llama

from aoquant.tools.markdown import table, wrapped

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BETWEEN_HOSTS = 40.0  # GB/s for each GPU: a 400 Gb/s adapter of its own, at four fifths
A_HOST = 8  # GPUs
GPUS = (8, 64, 512)
VARIANTS = ("bf16", "int4-g128", "nvfp4", "mxfp4", "fp8", "fp8-hybrid", "torchao:int4")
Rows = Sequence[Mapping[str, str]]


def layer_bytes(hidden: int) -> int:
    """Of the bf16 weights of one decoder layer of benchmarks/llamas.py."""
    size = llama(hidden, 1, 1)
    head = size.hidden // size.heads
    attention = size.hidden * head * 2 * (size.heads + size.kv_heads)
    return 2 * (attention + 3 * size.hidden * size.intermediate)


def timed(run: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Seconds of one call."""
    for stage in (3, repeats):
        dist.barrier()
        began = time.perf_counter()
        for _ in range(stage):
            run()
        if device.type == "cuda":
            torch.cuda.synchronize()
    return (time.perf_counter() - began) / repeats


def measure(hidden: int, repeats: int, out: Path) -> None:
    """Gather and scatter of one layer's weights by all ranks."""
    rank, device = int(os.environ.get("LOCAL_RANK", "0")), torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    world, table = dist.get_world_size(), Table(out / "communication.csv", device, silent=rank != 0)
    part = layer_bytes(hidden) // 2 // world
    whole, share = (torch.zeros(n, dtype=torch.bfloat16, device=device) for n in (part * world, part))
    for name, run in (
        ("all_gather", lambda: dist.all_gather_into_tensor(whole, share)),
        ("reduce_scatter", lambda: dist.reduce_scatter_tensor(share, whole)),
    ):
        seconds = timed(run, repeats, device)
        sent = 2 * part * (world - 1)
        table.add({"gpus": world, "hidden": hidden, "collective": name, "MiB": 2 * part * world / 2**20,
                   "ms": seconds * 1e3, "GB_per_s": sent / seconds / 1e9})  # fmt: skip
    dist.destroy_process_group()


@dataclass(frozen=True)
class Projection:
    """Seconds of a step: alone; hidden: 1 - e; between: of the messages of a step, by number of GPUs."""

    alone: float
    exposed: float
    layers: int
    hidden: int
    bandwidth: Mapping[str, float]

    def messages(self, gpus: int) -> float:
        """C(P): 2 gathers and a scattered sum of every layer; between hosts the slower link is what they wait for."""
        sent = self.layers * layer_bytes(self.hidden) * (gpus - 1) / gpus
        per_s = {
            name: (rate if gpus <= A_HOST else min(rate, BETWEEN_HOSTS)) * 1e9 for name, rate in self.bandwidth.items()
        }
        return sent * (2 / per_s["all_gather"] + 1 / per_s["reduce_scatter"])

    def step(self, gpus: int) -> float:
        """T(P)."""
        return max(self.alone + self.exposed * self.messages(gpus), self.messages(gpus))


def projection(steps: Mapping[int, float], bandwidth: Mapping[str, float], layers: int, hidden: int) -> Projection:
    """From the measured seconds of a step, by number of GPUs, 1 and another at least."""
    most, unmeasured = max(steps), Projection(steps[1], 0.0, layers, hidden, bandwidth)
    exposed = max(0.0, (steps[most] - steps[1]) / unmeasured.messages(most))
    return Projection(steps[1], exposed, layers, hidden, bandwidth)


def newest(rows: Rows, **wanted: str) -> Mapping[str, str] | None:
    """The last measured row with these columns."""
    found = [r for r in rows if all(r[k] == v for k, v in wanted.items()) and (r.get("ms") or "")]
    return found[-1] if found else None


def fastest(communication: Rows, hidden: int, gpu: str) -> dict[str, float]:
    """GB/s a GPU of each collective: the last measured on the most GPUs of this device, in messages of this layer."""
    here = [r for r in communication if (r["hidden"], r["gpu"]) == (str(hidden), gpu)]
    most = max((int(r["gpus"]) for r in here), default=0)
    found = {c: newest(here, collective=c, gpus=str(most)) for c in ("all_gather", "reduce_scatter")}
    return {name: float(row["GB_per_s"]) for name, row in found.items() if row}


def page(steps: Rows, communication: Rows, hidden: int, layers: int) -> str:
    """The tables: what was measured, and the projection where its two inputs are there. Of steps of one device and
    budget alone, the newest's.
    """
    shape = {"how": "eager", "hidden": str(hidden), "layers": str(layers)}
    last = newest(steps, **shape) or {}
    shape |= {name: last[name] for name in ("gpu", "vocabulary", "batch", "tokens", "optimizer") if name in last}
    numbers = sorted({int(r["gpus"]) for r in steps if r["ms"] and all(r[k] == v for k, v in shape.items())})
    heads = ["recipe", *(f"{n} GPU{'s' * (n > 1)}: tokens/s, GiB" for n in numbers)]
    lines = []
    for variant in VARIANTS:
        found = [newest(steps, variant=variant, gpus=str(n), **shape) for n in numbers]
        if any(found):
            lines.append([f"`{variant}`", *(cell(r) for r in found)])
    parts = [
        f"{layers} decoder layers of {hidden}, {last.get('gpu', '?')}: tokens/s of all GPUs together, peak memory of each.",
        table(heads, lines),
    ]
    bandwidth = fastest(communication, hidden, last.get("gpu", ""))
    if 1 in numbers and len(numbers) > 1 and len(bandwidth) == 2:
        parts += projected(steps, bandwidth, shape, numbers, hidden, layers)
    else:
        parts.append(
            "No projection to more GPUs: it needs steps of one GPU and of another number, and the collectives."
        )
    return "\n\n".join(parts)


def projected(
    steps: Rows,
    bandwidth: Mapping[str, float],
    shape: Mapping[str, str],
    numbers: Sequence[int],
    hidden: int,
    layers: int,
) -> list[str]:
    """The projection's table with its assumptions."""
    error = ""
    heads = ["recipe", "not hidden", *(f"{n} GPUs: tokens/s, of linear" for n in GPUS)]
    lines = []
    for variant in VARIANTS:
        found = {n: newest(steps, variant=variant, gpus=str(n), **shape) for n in numbers}
        times = {n: float(r["ms"]) / 1e3 for n, r in found.items() if r}
        if 1 not in times or len(times) < 2:
            continue
        p = projection(times, bandwidth, layers, hidden)
        one = found[1]
        assert one is not None
        tokens = int(one["batch"]) * int(one["tokens"])
        cells = [f"{float(f'{n * tokens / p.step(n):.2g}'):,.0f}, {p.alone / p.step(n):.2f}" for n in GPUS]
        lines.append([f"`{variant}`", f"{p.exposed:.2f}", *cells])
        if variant == VARIANTS[0]:
            slower = projection({n: t * (1.01 if n > 1 else 1) for n, t in times.items()}, bandwidth, layers, hidden)
            error = ", ".join(f"{100 * (slower.step(n) / p.step(n) - 1):.0f} % at {n}" for n in GPUS)
    rates = ", ".join(f"{name.replace('_', '-')} {rate:.0f}" for name, rate in bandwidth.items())
    words = (
        f"Projected, not measured. Messages of one layer had {rates} GB/s a GPU within this host. Assumed: hosts of {A_HOST} GPUs, "
        f"{BETWEEN_HOSTS:.0f} GB/s for each GPU between them, weights sharded over all GPUs and gathered in bf16, the same tokens a GPU, and "
        "the measured share of messages that a step does not hide. Left out: congestion, slow ranks, the latency of rings of hundreds, input, "
        "checkpoints. With hybrid sharding (HSDP) only gradients cross hosts. Each step is of one run: were that of several GPUs 1 % "
        f"longer in `{VARIANTS[0]}`, the projected ones would be {error} GPUs."
    )
    return [wrapped(words), table(heads, lines)]


def cell(row: Mapping[str, str] | None) -> str:
    if row is None:
        return ""
    total = float(row["tokens_per_s"]) * int(row["gpus"])
    return f"{total:,.0f}" + (f", {float(row['peak_MiB']) / 1024:.1f}" if row["peak_MiB"] else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, default=RESULTS)
    o = parser.parse_args()
    measure(o.hidden, o.repeats, o.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
