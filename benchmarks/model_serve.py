"""What a deployed Llama does for its user: `generate` in four ways, prefill, and becoming deployed.

eager: `model.generate(ids)`, nothing else. static: `cache_implementation="static"`, for which transformers compiles the
decoding step by itself, with CUDA graphs, on a GPU; on a CPU it does not. reduce-overhead: a static cache of the
user's, made before the prompt, and the user's own torch.compile(mode="reduce-overhead") of the model's forward, the
prompt's too. graph: one step of decoding, compiled, in a CUDA graph made by hand: no host in it, so the bound for the
others.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from beside import TIMED, Deadline, Row, Run, allocated, free, reason, wait
from graphs import graphed
from llamas import Size, build, deploy
from torch import Tensor
from transformers import LlamaForCausalLM, StaticCache

HOWS = ("eager", "static", "reduce-overhead", "graph")


@dataclass(frozen=True)
class Serving:
    """What is generated: batch texts, `prompt` tokens given, `new` tokens made."""

    size: Size
    batch: int
    prompt: int
    new: int
    device: torch.device
    backend: str = "inductor"  # of the user's own torch.compile

    def model(self, variant: str) -> LlamaForCausalLM:
        """A fresh deployed model."""
        model = build(self.size, self.device).eval().requires_grad_(False)
        deploy(model, variant)
        return model

    def ids(self, tokens: int) -> Tensor:
        """(batch, tokens) random ones."""
        torch.manual_seed(1)
        return torch.randint(1, self.size.vocabulary, (self.batch, tokens), device=self.device)


def generate(serving: Serving, how: str, variant: str) -> Run:
    """`how`: one of `HOWS`. A run makes `new` tokens, but a "graph" one."""
    model = serving.model(variant)
    if how == "graph":
        return one_token(serving, model)
    ids = serving.ids(serving.prompt)
    options: dict[str, object] = {} if how == "eager" else {"cache_implementation": "static"}
    if how == "reduce-overhead":
        mode = {"mode": how} if serving.backend == "inductor" else {"backend": serving.backend}
        model.forward = torch.compile(model.forward, **mode)
        cache = static_cache(serving, model)
        options = {"past_key_values": cache, "disable_compile": True}  # by transformers

    def run() -> Tensor:
        if how == "reduce-overhead":
            cache.reset()
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=serving.new,
            min_new_tokens=serving.new,
            do_sample=False,
            **options,
        )
        assert made.shape == (serving.batch, serving.prompt + serving.new)
        return made

    return run


def static_cache(serving: Serving, model: LlamaForCausalLM) -> StaticCache:
    """With its tensors. A cache makes them when it sees the prompt; those that a CUDA graph makes do not outlive it."""
    cache, c = StaticCache(config=model.config, max_cache_len=serving.prompt + serving.new), model.config
    cache.early_initialization(serving.batch, c.num_key_value_heads, c.head_dim, model.dtype, serving.device)
    return cache


@torch.no_grad()
def one_token(serving: Serving, model: LlamaForCausalLM) -> Run:
    """A graph of one token behind the prompt, always the same one: the graph puts the cache's lengths back first."""
    cache = StaticCache(config=model.config, max_cache_len=serving.prompt + serving.new)
    model(serving.ids(serving.prompt), past_key_values=cache, use_cache=True, logits_to_keep=1)
    lengths = [layer.cumulative_length for layer in cache.layers]
    behind_prompt = [t.clone() for t in lengths]
    compiled = torch.compile(model.forward)
    token = serving.ids(1)
    position = torch.full((serving.batch, 1), serving.prompt, device=serving.device)

    @torch.no_grad()
    def step() -> Tensor:
        torch._foreach_copy_(lengths, behind_prompt)
        return compiled(input_ids=token, position_ids=position, past_key_values=cache, use_cache=True).logits

    return graphed(step, warm_up=3)


def prefill(serving: Serving, variant: str) -> Run:
    """The prompt's keys, values and last logits, as `generate` asks for them."""
    model, ids = serving.model(variant), serving.ids(serving.prompt)

    @torch.no_grad()
    def run() -> None:
        model(input_ids=ids, use_cache=True, logits_to_keep=1)

    return run


def conversions(serving: Serving, variants: Sequence[str], named: Row, deadline: Deadline) -> Iterator[Row]:
    """Milliseconds of `quantize_` on a whole model. "note" has those of the first call, which compiles its kernels.

    peak_MiB: by how much memory rises during it above the bf16 model's.
    """
    for variant in variants:
        row = {**named, "variant": variant, **dict.fromkeys(TIMED, "")}
        if deadline.passed:
            yield row | {"note": "not run: out of time"}
            continue
        try:
            times, peak = [], 0
            for _ in range(2):
                free(serving.device)
                model = build(serving.size, serving.device).eval().requires_grad_(False)
                wait(serving.device)
                floor = allocated(serving.device)
                if serving.device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats(serving.device)
                start = time.perf_counter()
                deploy(model, variant)
                wait(serving.device)
                times.append((time.perf_counter() - start) * 1e3)
                if serving.device.type == "cuda":
                    peak = torch.cuda.max_memory_allocated(serving.device) - floor
                del model
            row |= {"ms": times[1], "note": f"the first took {times[0]:.0f} ms"}
            if serving.device.type == "cuda":
                row["peak_MiB"] = peak / 2**20
        except Exception as error:  # as in beside.py
            row["note"] = reason(error)
        yield row
