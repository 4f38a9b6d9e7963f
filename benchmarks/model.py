"""What a user of aoquant meets, beside bf16 and torchao in one run.

That is: a training step, `model.generate`, the prefill of a long prompt, peak memory, and the conversion of a model.

    python benchmarks/model.py [train] [generate] [prefill] [convert] [--recipes ...] [--torchao ...] [--limit SECONDS]
    python benchmarks/model.py train --small --tokens 16 1024 --how eager compiled graph
    python benchmarks/model.py train --gemma --recipes int4-g128 fp8 nvfp4 mxfp4 --torchao --steps 16 [--clock kernels]
    torchrun --nproc-per-node 4 benchmarks/model.py train --layers 16 [--recipes fp8-hybrid --gather codes]

Models are Llamas, or a Gemma, with random weights; tokens are random, or those of `train --text`. Every row is a ratio
to the same model in bf16, timed in turns with it (beside.py); a variant that a library or a GPU refuses has the reason
in its row. Rows are appended to benchmarks/results/model_PART.csv.

    of_bf16_time   its time over bf16's; speed: bf16's time over its own (of `generate`: the ratio of tokens per second)
    of_bf16_peak   the most memory that a run holds, weights, gradients and optimiser included, over bf16's

Under torchrun the training step is FSDP2's, its layers' default is 16, and the other parts are refused. Without a GPU
everything runs on the CPU, on sizes that are given or by --quick, whose numbers mean nothing: it is for the tests.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from beside import Cell, Deadline, Row, Table, kernel_seconds, measured, seconds
from llamas import GEMMA_270M, SMALL, TORCHAO, Size, check, llama
from model_serve import HOWS, Serving, conversions, generate, prefill
from model_train import OPTIMIZERS, Training, step_of, text_ids

PARTS = ("train", "generate", "prefill", "convert")
RECIPES = {
    "train": ("int4-g128", "nvfp4", "mxfp4", "mxfp8", "fp8", "fp8-hybrid", "torchao-fp8"),
    "serve": ("int4-g128", "nvfp4-weight", "nvfp4", "fp8"),
}
PEERS = {
    "train": ("int4", "mxfp4", "mxfp8", "fp8", "nvfp4"),
    "serve": ("int4-tinygemm", "int4", "fp8"),
}
LAYERS = {2048: 16, 4096: 8}  # of served models
TINY = Size(128, 256, 4, 2, 2, 8192)  # the vocabulary of --text


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("parts", nargs="*", choices=[[], *PARTS], help="default: all, under torchrun train")
    add("--recipes", nargs="*", help="aoquant's; default: those of the README's table")
    add(
        "--torchao",
        nargs="*",
        help=f"torchao's own, without the prefix {TORCHAO!r}; default: those that train or run on Hopper",
    )
    add(
        "--small",
        action="store_true",
        help="the model of docs/evidence/experiments.md, 21.9 M parameters, and no other size",
    )
    add("--gemma", action="store_true", help="train: Gemma 3 270M's shape, 262 144 tokens of vocabulary, and no other")
    add("--hidden", nargs="+", type=int, help="default: 4096 to train, 2048 and 4096 to serve")
    add("--layers", type=int, help="default: 4 to train, 16 under torchrun; 16 or 8 to serve, for hidden 2048 or 4096")
    add("--vocabulary", type=int, default=32768)
    add(
        "--how",
        nargs="+",
        choices=("eager", "compiled", *HOWS[1:]),
        help="of training: eager, compiled, and graph on one GPU; of generate: eager, static, reduce-overhead, graph",
    )
    add("--batch", nargs="+", type=int, default=[1], help="texts that are generated together")
    add("--prompt", type=int, default=32)
    add("--new", type=int, default=64, help="tokens that are generated")
    add("--prefill", type=int, default=4096, help="tokens")
    add(
        "--tokens",
        type=int,
        nargs=2,
        default=(4, 2048),
        metavar=("BATCH", "LENGTH"),
        help="of a training step, for each GPU",
    )
    add(
        "--text",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="train: the first tokens of these in every step, by the demo model's tokenizer (8192)",
    )
    add("--optimizer", choices=OPTIMIZERS, default="adamw")
    add("--compile", choices=("blocks", "whole"), default="blocks", help="what a compiled training step compiles")
    add("--gather", choices=("bf16", "codes"), default="bf16", help="what FSDP2 gathers of aoquant's weights")
    add("--alone", action="store_true", help="train: one model at a time, where bf16 and a variant do not fit together")
    add("--rounds", type=int, default=5)
    add(
        "--steps",
        type=int,
        default=2,
        help="train: how many steps a round has; the first starts with an idle device, which waits for the host",
    )
    add(
        "--clock",
        choices=("steps", "kernels"),
        default="steps",
        help="train: kernels: time those of a step on a GPU alone, without the gaps between them",
    )
    add("--limit", type=float, default=0, metavar="SECONDS", help="after this, nothing new is begun")
    add("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    add("--quick", action="store_true", help="tiny shapes, one round, compiled without Inductor")
    args = parser.parse_args()
    args.world = int(os.environ.get("WORLD_SIZE", "1")) if dist.is_torchelastic_launched() else 0
    args.parts = args.parts or (["train"] if args.world else list(PARTS))
    if args.world and args.parts != ["train"]:
        parser.error("torchrun is for train alone")
    if args.steps < 1:
        parser.error("--steps must be at least 1")
    if args.clock == "kernels" and (args.parts != ["train"] or not torch.cuda.is_available()):
        parser.error("--clock kernels is for train alone, on a GPU")
    if args.gemma and args.parts != ["train"]:
        parser.error("--gemma is for train alone")
    if args.quick:
        args.rounds, args.steps, args.prompt, args.new, args.prefill, args.tokens = 1, 1, 4, 3, 8, (1, 8)
    for name in ("train", "serve"):
        try:
            for variant in variants(args, name):
                check(variant)
        except ValueError as error:
            parser.error(str(error))
    return args


def variants(args: argparse.Namespace, to: str) -> list[str]:
    """Names for llamas.py, of what is trained ("train") or deployed ("serve")."""
    ours = RECIPES[to] if args.recipes is None else args.recipes
    peers = PEERS[to] if args.torchao is None else args.torchao
    return [*ours, *(TORCHAO + name for name in peers)]


def hows(args: argparse.Namespace, known: Sequence[str]) -> list[str]:
    """The known ways among those asked for; without any asked for, those that change nothing of a user's code."""
    return [how for how in args.how or ("eager", "compiled", "static") if how in known]


def sizes(args: argparse.Namespace, hidden: Sequence[int], layers: Callable[[int], int]) -> list[Size]:
    if args.quick:
        return [replace(TINY, gemma=args.gemma)]
    if args.small or args.gemma:
        return [GEMMA_270M if args.gemma else SMALL]
    return [llama(h, args.layers or layers(h), args.vocabulary) for h in args.hidden or hidden]


def named(part: str, how: str, size: Size, **more: Any) -> Row:
    """The columns that say what a row is about."""
    columns = dict.fromkeys(("batch", "tokens", "optimizer", "gpus", "steps"), "") | more
    return {
        "part": part,
        "how": how,
        "hidden": size.hidden,
        "layers": size.layers,
        "vocabulary": size.vocabulary,
        **columns,
    }


def train(args: argparse.Namespace, device: torch.device, deadline: Deadline) -> Iterator[Row]:
    """Training steps."""
    batch, tokens = args.tokens
    text = text_ids(args.text) if args.text else None
    for size in sizes(args, (4096,), lambda hidden: 16 if args.world else 4):
        graph = ("graph",) if device.type == "cuda" and not args.world else ()
        for how in hows(args, ("eager", "compiled", *graph)):
            torch._dynamo.reset()
            backend = "aot_eager" if args.quick else "inductor"
            codes = bool(args.world) and args.gather == "codes"
            of = Training(
                size, batch, tokens, args.optimizer, how, args.compile, backend, bool(args.world), codes, device, text
            )
            ways = {
                "eager": "eager",
                "compiled": f"compiled {args.compile}",
                "graph": f"graph, compiled {args.compile}",
            }
            way = ways[how] + (", codes gathered" if codes else "")
            way += ", kernels alone" if args.clock == "kernels" else ""
            columns = named(
                "fsdp2" if args.world else "train",
                way,
                size,
                batch=batch,
                tokens=tokens,
                optimizer=args.optimizer,
                gpus=args.world or 1,
                steps=args.steps,
            )
            cell = Cell(
                columns,
                partial(step_of, of),
                batch * tokens,
                args.rounds,
                device,
                repeats=args.steps,
                alone=args.alone,
                clock=kernel_seconds if args.clock == "kernels" else seconds,
            )
            yield from measured(cell, variants(args, "train"), deadline)


def serve(part: str, args: argparse.Namespace, device: torch.device, deadline: Deadline) -> Iterator[Row]:
    """`generate`, prefill or conversion."""
    for size in sizes(args, (2048, 4096), lambda hidden: LAYERS.get(hidden, 8)):
        if part == "prefill":
            of = Serving(size, 1, args.prefill, 0, device)
            cell = Cell(
                named(part, "eager", size, batch=1, tokens=args.prefill),
                partial(prefill, of),
                args.prefill,
                args.rounds,
                device,
            )
            yield from measured(cell, variants(args, "serve"), deadline)
            continue
        if part == "convert":
            of = Serving(size, 1, 1, 0, device)
            yield from conversions(of, variants(args, "serve"), named(part, "eager", size), deadline)
            continue
        for how in hows(args, HOWS):
            for batch in args.batch:
                torch._dynamo.reset()
                backend = "aot_eager" if args.quick else "inductor"
                of = Serving(size, batch, args.prompt, args.new, device, backend)
                made = batch * (1 if how == "graph" else args.new)
                repeats = 20 if how == "graph" else 1
                columns = named(part, how, size, batch=batch, tokens=args.new)
                cell = Cell(columns, partial(generate, of, how), made, args.rounds, device, 2, repeats)
                yield from measured(cell, variants(args, "serve"), deadline)


def main() -> int:
    args = parse()
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if args.world:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo", device_id=device if device.type == "cuda" else None
        )
    torch._dynamo.config.recompile_limit = 64  # every variant of a cell is a compiled form of one function
    deadline = Deadline(args.limit)
    for part in args.parts:
        name = "fsdp2" if args.world else part
        table = Table(args.out / f"model_{name}.csv", device, silent=rank != 0)
        rows = train(args, device, deadline) if part == "train" else serve(part, args, device, deadline)
        for row in rows:
            table.add(row)
    if args.world:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
