"""A student that FSDP2 shards over two ranks: what one process trains, with no whole model on a rank meanwhile."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.models import tiny_llama
from support.two_ranks import make
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer

import aoquant
from aoquant import QATConfig, quantize_
from aoquant.integrations import finetune as tuning
from aoquant.integrations.finetune import finetune
from aoquant.integrations.launched import Ranks
from aoquant.integrations.teacher_cache import opened
from aoquant.integrations.text import assets

BLOCKS = torch.arange(12 * 16).view(12, 16) % 31
llama = partial(tiny_llama, vocabulary=33, dtype=torch.float32, num_hidden_layers=2)


def tune(model: Any, teacher: Any, *, shared: bool, **options: Any) -> list[float]:
    return finetune(
        model, BLOCKS, steps=6, batch_size=4, learning_rate=1e-3, loss="kl", teacher=teacher, seed=3, label="tune",
        shared=shared, **options,
    )  # fmt: skip


def equal(a: Any, b: Any) -> bool:
    state = b.state_dict()
    return all(torch.equal(value, state[name]) for name, value in a.state_dict().items())


def same_numbers(rank: int, folder: Path) -> None:
    """Losses and weights within 1e-5 of one process's (another order of sums); ranks, and what they save, are equal."""
    alone, student, teacher = llama("int4-g32"), llama("int4-g32"), llama(None)
    losses = tune(alone, teacher, shared=False)
    assert tune(student, teacher, shared=True) == pytest.approx(losses, rel=1e-5, abs=1e-6)
    for (name, p), q in zip(alone.named_parameters(), student.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-4, atol=1e-5, msg=name)
    assert student.lm_head.weight is student.model.embed_tokens.weight
    prepared = copy.deepcopy(student)
    quantize_(student, QATConfig(step="convert"))
    with torch.no_grad():
        assert torch.equal(student(input_ids=BLOCKS).logits, prepared(input_ids=BLOCKS).logits)
    aoquant.save_pretrained(student, folder / "checkpoint", AutoTokenizer.from_pretrained(assets()))  # rank 0 writes
    dist.barrier()
    assert equal(aoquant.load_pretrained(folder / "checkpoint"), student)


def no_whole_model(rank: int, folder: Path) -> None:
    """While it trains, a rank has half of each parameter, and the model that was given has none."""
    student, seen, step = llama("quartet", dtype=torch.bfloat16), list[int](), tuning.block_loss
    total = sum(p.numel() for p in student.parameters())

    def watched(trained: Any, *args: Any, **options: Any) -> Any:
        assert all(isinstance(p, DTensor) for p in trained.parameters())
        seen.append(sum(p.to_local().numel() for p in trained.parameters()))
        assert sum(p.numel() for p in student.parameters()) == 0
        return step(trained, *args, **options)

    with mock.patch.object(tuning, "block_loss", watched):
        tune(student, llama(None, dtype=torch.bfloat16), shared=True)
    assert len(seen) == 6 and all(n < 0.51 * total for n in seen)
    assert sum(p.numel() for p in student.parameters()) == total


def frozen_parts_are_shared(rank: int, folder: Path) -> None:
    teacher = llama(None)
    teacher.model.embed_tokens.weight.requires_grad_(False)
    student = copy.deepcopy(teacher, {id(p): p for p in teacher.parameters() if not p.requires_grad})
    quantize_(student, QATConfig("int4-g32"))
    before = teacher.model.embed_tokens.weight.clone()
    tune(student, teacher, shared=True)
    assert student.model.embed_tokens.weight is teacher.model.embed_tokens.weight
    assert torch.equal(before, teacher.model.embed_tokens.weight)
    assert not torch.equal(student.model.layers[0].mlp.up_proj.weight, teacher.model.layers[0].mlp.up_proj.weight)


def with_a_cache(rank: int, folder: Path) -> None:
    ranks = Ranks(rank, 2, launched=True)
    tokenizer = AutoTokenizer.from_pretrained(assets())
    cache = opened(folder / "cache", llama(None), tokenizer, BLOCKS, 33, ranks)
    cache.fill(llama(None), BLOCKS, torch.arange(12), ranks)
    beside = tune(llama("int4-g32"), llama(None), shared=True)
    assert tune(llama("int4-g32"), cache, shared=True) == pytest.approx(beside, rel=1e-4, abs=1e-6)


def test_two_ranks() -> None:
    make({f.__name__: f for f in (same_numbers, no_whole_model, frozen_parts_are_shared, with_a_cache)})
