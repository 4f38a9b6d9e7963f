"""`generate` and prefill of packed models on a CPU, beside bf16 and torchao's layers: `benchmarks/cpu.py generate`.

Two models: the demo's, 256 wide, as eval/assets has it, and a Llama of 4 layers, 1024 wide, with random weights. All
variants of a model are made first. A round then runs one call of each in turn, and a cell is the least time of all
rounds: what else the machine does only ever adds to a time. With one thread the clock counts this process's time alone;
with several, on a machine that has other work, each waits for the slowest, and even the least time is a busy one's.

`of_torchao` is aoquant's time over that of torchao's layer of the same kind. Peak memory is the weights' bytes and the
most bytes of tensors that one call holds beside them, counted by torch's profiler.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from llamas import BASE, BF16, TORCHAO, build, deploy, llama
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM
from transformers.utils import logging

DEMO = Path(__file__).resolve().parents[1] / "eval" / "assets"
PEERS = {"int4-g128": "int4-cpu", "int8-int4": "int8-int4", "int8": "int8"}  # recipe -> torchao's, in llamas.py
VARIANTS = (BASE, *PEERS, *(TORCHAO + peer for peer in PEERS.values()))
COLUMNS = ("part", "model", "variant", "ms", "tokens_per_s", "of_bf16", "of_torchao", "peak_MiB", "peak_of_bf16")
SLACK = 1.1  # least times of a busy machine still differ by some hundredths


def demo(variant: str) -> nn.Module:
    model: nn.Module = AutoModelForCausalLM.from_pretrained(DEMO, dtype=BF16)
    return model if variant == BASE else _deployed(model, variant)


def llama_1024(variant: str) -> nn.Module:
    return _deployed(build(llama(1024, 4, 8192), torch.device("cpu")), variant)


def _deployed(model: nn.Module, variant: str) -> nn.Module:
    deploy(model, variant)
    return model


MODELS: dict[str, Callable[[str], nn.Module]] = {"demo-256": demo, "llama-1024": llama_1024}


def call(model: Any, part: str, prompt: int, new: int) -> Callable[[], Any]:
    """One call of `generate`, or the forward that fills its cache."""
    torch.manual_seed(1)
    ids = torch.randint(1, model.config.vocab_size, (1, prompt))

    def generate() -> Tensor:
        made: Tensor = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False
        )
        return made

    @torch.no_grad()
    def prefill() -> None:
        model(input_ids=ids, use_cache=True, logits_to_keep=1)

    return generate if part == "generate" else prefill


def weights(model: nn.Module) -> int:
    """Bytes of all parameters, each part of a quantised one included."""
    return sum(_bytes(p) for p in model.parameters())


def _bytes(t: Any) -> int:
    if hasattr(t, "__tensor_flatten__"):
        return sum(_bytes(getattr(t, name)) for name in t.__tensor_flatten__()[0])
    return int(t.numel() * t.element_size())


def held(run: Callable[[], Any]) -> int:
    """The most bytes that a run allocates at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most


def rows(part: str, name: str, args: argparse.Namespace, clock: Callable[[], float]) -> Iterator[dict[str, Any]]:
    """A row for each variant of one model."""
    models = {variant: MODELS[name](variant).eval().requires_grad_(False) for variant in VARIANTS}
    prompt = args.prompt if part == "generate" else args.prefill
    runs = {variant: call(model, part, prompt, args.new) for variant, model in models.items()}
    for run in runs.values():
        run()
    least = dict.fromkeys(runs, float("inf"))
    for _ in range(args.rounds):
        for variant, run in runs.items():
            start = clock()
            run()
            least[variant] = min(least[variant], clock() - start)
    peaks = {variant: (weights(models[variant]) + held(run)) / 2**20 for variant, run in runs.items()}
    tokens = args.new if part == "generate" else prompt
    for variant, seconds in least.items():
        peer = PEERS.get(variant)
        yield {
            "part": part,
            "model": name,
            "variant": variant,
            "ms": f"{seconds * 1e3:.1f}",
            "tokens_per_s": f"{tokens / seconds:.1f}",
            "of_bf16": f"{seconds / least[BASE]:.2f}",
            "of_torchao": "" if peer is None else f"{seconds / least[TORCHAO + peer]:.2f}",
            "peak_MiB": f"{peaks[variant]:.1f}",
            "peak_of_bf16": f"{peaks[variant] / peaks[BASE]:.2f}",
        }


def _quiet() -> None:
    """No bars and no lines of the profiler between the rows."""
    logging.disable_progress_bar()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read when the first profile starts


def serve(args: argparse.Namespace, facts: dict[str, str], clock: Callable[[], float]) -> int:
    """Print the table; 1 if a row of ours takes longer than torchao's by more than `SLACK`."""
    _quiet()
    lines = [f"# {key}: {value}" for key, value in facts.items()]
    lines += [
        f"# generate: {args.new} tokens behind {args.prompt}; prefill: {args.prefill} tokens; batch 1, bf16, eager; least of {args.rounds} rounds",
        "",
        ",".join(COLUMNS),
    ]
    print("\n".join(lines), flush=True)
    slow = 0
    for part in ("generate", "prefill"):
        for name in args.models:
            for row in rows(part, name, args, clock):
                lines.append(",".join(str(row[column]) for column in COLUMNS))
                print(lines[-1], flush=True)
                slow += bool(row["of_torchao"]) and float(row["of_torchao"]) > SLACK
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        suffix = "_1_thread" if torch.get_num_threads() == 1 else ""
        (args.out / f"cpu_generate{suffix}.csv").write_text("\n".join(lines) + "\n")
    return int(slow > 0)
