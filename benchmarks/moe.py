"""Stacked experts of one layer, trained and served, beside bf16 `torch._grouped_mm` and transformers' own classes.

    python benchmarks/moe.py [train] [decode] [--shapes ...] [--recipes ...] [--limit SECONDS] [--quick]

The shapes are those of Qwen3-30B-A3B, gpt-oss-20b and Mixtral. Two things are timed, in cells of their own:

    block      the module: routing to output. Its twin is transformers' class under "grouped_mm"; "hf-eager" is the same
               class's own forward, a loop.
    products   its two grouped products alone, over rows that are sorted already. Their twin is `torch._grouped_mm`.
    gate_up, down    one of these two, where it is asked for (--what): their shapes have different limits

    train      forward and backward of 8192 tokens, gradients of the input and of the weights
    decode     packed experts, a CUDA graph of `CALLS` calls, each with a routing of its own, so that weights come from
               memory and not from a cache; "hf-eager" waits for its routing and cannot be in a graph: it is called

Routing is random and even. Every row is a ratio to its twin in bf16, timed in turns with it (beside.py). A recipe's
packed experts are timed after they gave their prepared layer's bits. Rows are appended to benchmarks/results/moe.csv.
Without a GPU it runs on the CPU, with --quick on tiny shapes whose numbers mean nothing: for the tests.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from beside import Cell, Deadline, Run, Table, measured
from graphs import graphed
from llamas import BASE, BF16
from torch import Tensor, nn
from transformers import GptOssConfig, MixtralConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from aoquant import QATConfig, quantize_
from aoquant.experts.grouped_linear import Rows, grouped_at_once, why_not_at_once
from aoquant.formats import Encoded
from aoquant.ops import stacks
from aoquant.recipes import get_recipe

HF_EAGER = "hf-eager"
PARTS, WHATS = ("train", "decode"), ("block", "products")
PRODUCTS = {
    "products": ("gate_up_proj", "down_proj"),
    "gate_up": ("gate_up_proj",),
    "down": ("down_proj",),
}
TRAINED = ("int4-g32", "int4-g128", "mxfp4-weight", "mxfp4", "nvfp4", "fp8")
SERVED = ("int4-g32", "int4-g128", "mxfp4-weight", "nvfp4-weight", "mxfp4", "nvfp4")
TOKENS = {"train": (8192,), "decode": (1, 4, 16, 64, 4096)}
CALLS = 16


@dataclass(frozen=True)
class Shape:
    """The experts of one layer."""

    family: str
    experts: int
    hidden: int
    intermediate: int
    top_k: int


SHAPES = {
    "qwen3-30b-a3b": Shape("qwen3", 128, 2048, 768, 8),
    "gpt-oss-20b": Shape("gpt-oss", 32, 2880, 2880, 4),
    "mixtral": Shape("mixtral", 8, 4096, 14336, 2),
}
TINY = {"tiny": Shape("mixtral", 4, 128, 256, 2), "tiny-gpt-oss": Shape("gpt-oss", 4, 128, 128, 2)}


@dataclass(frozen=True)
class Work:
    """What a cell times."""

    shape: Shape
    what: str
    tokens: int
    device: torch.device


def block(shape: Shape, device: torch.device, implementation: str) -> nn.Module:
    """transformers' class with random weights, by the name that experts have in a model."""
    sizes = {"hidden_size": shape.hidden, "num_experts_per_tok": shape.top_k}
    if shape.family == "qwen3":
        config: Any = Qwen3MoeConfig(**sizes, num_experts=shape.experts, moe_intermediate_size=shape.intermediate)
    else:
        of = GptOssConfig if shape.family == "gpt-oss" else MixtralConfig
        config = of(**sizes, num_local_experts=shape.experts, intermediate_size=shape.intermediate)
    config._experts_implementation = implementation
    cls = {"qwen3": Qwen3MoeExperts, "gpt-oss": GptOssExperts, "mixtral": MixtralExperts}[shape.family]
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(BF16)
    try:
        with torch.device(device):
            experts = cls(config)
    finally:
        torch.set_default_dtype(before)
    for p in experts.parameters():
        p.data.normal_(0, 0.02)
    return nn.ModuleDict({"experts": experts})


def batch(work: Work, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, their experts and weights."""
    g = torch.Generator(work.device).manual_seed(seed)
    x = torch.randn(work.tokens, work.shape.hidden, generator=g, device=work.device).to(BF16)
    scores = torch.rand(work.tokens, work.shape.experts, generator=g, device=work.device)
    weights, index = scores.topk(work.shape.top_k)
    return x, index, weights.to(BF16)


def implementation_of(variant: str) -> str:
    return "eager" if variant == HF_EAGER else "grouped_mm"


def train(work: Work, variant: str) -> Run:
    """A step whose gradients are made anew."""
    model = block(work.shape, work.device, implementation_of(variant))
    if variant not in (BASE, HF_EAGER):
        quantize_(model, get_recipe(variant).prepare())
    if work.what in PRODUCTS:
        return train_products(work, variant, model)
    x, index, weights = batch(work, 1)
    x.requires_grad_()
    grad = torch.randn_like(x)

    def step() -> None:
        x.grad = None
        model.zero_grad()
        model["experts"](x, index, weights).backward(grad)

    return step


def _stack(e: Encoded, experts: int) -> Encoded:
    """Codes of all experts' rows, with the experts in front."""
    codes, scale, zero, outer = (None if t is None else t.unflatten(0, (experts, -1)) for t in e.tensors)
    assert codes is not None
    return Encoded(codes, scale, zero, outer, e.k)


class Products:
    """The grouped products that `work` asks for, of rows that are sorted by expert."""

    def __init__(self, work: Work, model: nn.Module, variant: str, packed: bool) -> None:
        self.experts: Any = model["experts"]
        self.variant, self.packed = variant, packed
        self.turned = self.experts.is_transposed
        rows, (e, inner) = work.tokens * work.shape.top_k, (work.shape.experts, work.shape.intermediate)
        self.names = PRODUCTS[work.what]
        widths = {"gate_up_proj": work.shape.hidden, "down_proj": inner}
        self.x = {name: torch.randn(rows, widths[name], device=work.device).to(BF16) for name in self.names}
        self.ends = []
        for seed in range(CALLS):
            index = batch(work, seed)[1].flatten()
            self.ends.append(torch.bincount(index, minlength=e).cumsum(0).to(torch.int32))
        self.held: dict[str, Any] = {}
        if variant != BASE:
            self.recipes = {name: self.experts.stacks[name].recipe for name in self.names}
        for name in self.names:
            self.held[name] = getattr(self.experts, name)
            if packed and variant != BASE:
                recipe = self.recipes[name]
                self.held[name] = _stack(stacks.encode(recipe.fprop_weight, self.held[name].detach(), self.turned), e)
                reason = why_not_at_once(recipe, self.held[name])
                if reason is not None and work.device.type == "cuda":
                    raise ValueError(reason)
        if packed and variant != BASE:
            for name in PRODUCTS["products"]:  # what is packed is not there twice
                setattr(self.experts, name, None)

    def __call__(self, i: int) -> list[Tensor]:
        return [self._one(name, x, self.ends[i]) for name, x in self.x.items()]

    def _one(self, name: str, x: Tensor, ends: Tensor) -> Tensor:
        w = self.held[name]
        if self.variant != BASE:
            return grouped_at_once(x, w, Rows(ends), self.recipes[name], self.turned)
        return torch._grouped_mm(x, w if self.turned else w.transpose(1, 2), offs=ends)


def train_products(work: Work, variant: str, model: nn.Module) -> Run:
    if variant == HF_EAGER:
        raise ValueError("a loop has no grouped products")
    products = Products(work, model, variant, packed=False)
    inputs = [x.requires_grad_() for x in products.x.values()]
    grads = [torch.randn_like(y) for y in products(0)]

    def step() -> None:
        model.zero_grad()
        for x in inputs:
            x.grad = None
        for y, grad in zip(products(0), grads, strict=True):
            y.backward(grad)

    return step


@torch.no_grad()
def decode(work: Work, variant: str) -> Run:
    """`CALLS` calls, in a graph where there is a GPU."""
    model = block(work.shape, work.device, implementation_of(variant)).eval()
    quantised = variant not in (BASE, HF_EAGER)
    batches = [batch(work, seed) for seed in range(CALLS)]
    if quantised:
        quantize_(model, get_recipe(variant).prepare())
    if work.what in PRODUCTS:
        if variant == HF_EAGER:
            raise ValueError("a loop has no grouped products")
        calls: Any = Products(work, model, variant, packed=True)
    else:
        if quantised:
            wanted = model["experts"](*batches[0])
            quantize_(model, QATConfig(step="convert"))
            if not torch.equal(model["experts"](*batches[0]), wanted):
                raise RuntimeError("the exactness gate is red: packed experts are not their prepared ones")
            del wanted

        def calls(i: int) -> Tensor:
            y: Tensor = model["experts"](*batches[i])
            return y

    @torch.no_grad()
    def run() -> list[Any]:
        return [calls(i) for i in range(CALLS)]

    return run if variant == HF_EAGER or work.device.type != "cuda" else graphed(run)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("parts", nargs="*", choices=[[], *PARTS], help="default: both")
    add("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    add("--what", nargs="+", choices=["block", *PRODUCTS], default=list(WHATS))
    add("--recipes", nargs="+", help="aoquant's; default: those of the project's goals")
    add("--tokens", nargs="+", type=int, help="default: 8192 to train; 1, 4, 16, 64 and 4096 to decode")
    add("--rounds", type=int, default=7)
    add("--limit", type=float, default=0, metavar="SECONDS", help="after this, nothing new is begun")
    add("--out", type=Path, default=Path(__file__).resolve().parent / "results" / "moe.csv")
    add("--quick", action="store_true", help="tiny shapes, one round")
    args = parser.parse_args()
    args.parts = args.parts or list(PARTS)
    for recipe in args.recipes or ():
        try:
            get_recipe(recipe)
        except ValueError as error:
            parser.error(str(error))
    return args


def cells(args: argparse.Namespace, device: torch.device, part: str) -> Iterator[tuple[Cell, list[str]]]:
    """What is timed, and its variants."""
    shapes = TINY if args.quick else {name: SHAPES[name] for name in args.shapes}
    all_tokens = args.tokens or ((8,) if args.quick else TOKENS[part])
    recipes = args.recipes or (TRAINED if part == "train" else SERVED)
    for name, shape in shapes.items():
        for tokens in all_tokens:
            for what in args.what:
                work = Work(shape, what, tokens, device)
                named = {"part": part, "what": what, "shape": name, "experts": shape.experts, "hidden": shape.hidden,
                         "intermediate": shape.intermediate, "top_k": shape.top_k, "tokens": tokens}  # fmt: skip
                made = partial(train if part == "train" else decode, work)
                runs = tokens * (1 if part == "train" else CALLS)
                cell = Cell(named, made, runs, 1 if args.quick else args.rounds, device, 2, 1 if args.quick else 3)
                yield cell, [*recipes, *((HF_EAGER,) if what == "block" else ())]


def main() -> int:
    args = parse()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    deadline, table = Deadline(args.limit), Table(args.out, device)
    for part in args.parts:
        for cell, variants in cells(args, device, part):
            for row in measured(cell, variants, deadline):
                table.add(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
