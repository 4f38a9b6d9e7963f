"""A training step of a language model on random tokens or on a text's: forward, loss, backward, optimiser.

The loss is transformers' cross entropy of all logits. A Gemma's logits are too large for that: its loss is that of
`aoquant run`, which makes them a chunk of tokens at a time.

"compiled" compiles each decoder layer (as torchtitan does), or the whole model. "graph" captures the compiled step with
its optimiser in a CUDA graph. The optimiser is PyTorch's fused AdamW with moments in bf16, or plain SGD. It runs on one
GPU, or sharded by FSDP2 under torchrun: every rank has tokens of its own, each decoder layer is one unit of
`fully_shard`, and the clock waits for all ranks. With `codes` the ranks gather aoquant's weights as codes, where that
is less than bf16.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from beside import Run
from graphs import graphed
from llamas import TORCHAO, Size, build, prepare
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, AdamW, Optimizer
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from aoquant.integrations.distributed import quantized_all_gather
from aoquant.integrations.finetune import block_loss

OPTIMIZERS = ("adamw", "sgd")
EVAL = Path(__file__).resolve().parents[1] / "eval"


@dataclass(frozen=True)
class Training:
    """What a step is.

    how: "eager", "compiled" or "graph". compile: "blocks" or "whole". backend: torch.compile's. batch, tokens: of each
    rank. text: token ids of a text, (any number,), of which each rank takes a part of its own; None: random tokens.
    """

    size: Size
    batch: int
    tokens: int
    optimizer: str
    how: str
    compile: str
    backend: str
    sharded: bool
    codes: bool
    device: torch.device
    text: Tensor | None = None


def text_ids(files: Sequence[Path]) -> Tensor:
    """Token ids (any number,) of texts (.txt or .jsonl, plain or .xz), by the tokenizer of eval's demo model."""
    sys.path.insert(0, str(EVAL))
    import corpus

    tokenizer = PreTrainedTokenizerFast.from_pretrained(EVAL / "assets")
    return corpus.encode(tokenizer, corpus.read_documents(tuple(files)), "text").long()


def ids_of(training: Training) -> Tensor:
    """This rank's tokens (batch, tokens). Raises ValueError for a text that is too short or has unknown tokens."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if training.sharded else (0, 1)
    shape, text = (training.batch, training.tokens), training.text
    if text is None:
        torch.manual_seed(1 + rank)
        return torch.randint(training.size.vocabulary, shape, device=training.device)
    here = training.batch * training.tokens
    if len(text) < ranks * here or int(text.max()) >= training.size.vocabulary:
        raise ValueError(
            f"the text must have {ranks * here:,} tokens below the vocabulary of {training.size.vocabulary}, "
            f"got {len(text):,}, the largest {int(text.max())}"
        )
    return text[rank * here : (rank + 1) * here].view(shape).to(training.device)


def optimizer_of(training: Training, model: PreTrainedModel) -> Optimizer:
    if training.optimizer == "sgd":
        return SGD(model.parameters(), lr=1e-5)
    return AdamW(model.parameters(), lr=1e-5, fused=True, capturable=training.how == "graph")


def loss_of(training: Training, model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return the mean cross entropy of the next tokens."""
    if not training.size.gemma:
        loss: Tensor = model(input_ids=ids, labels=ids).loss
        return loss
    rows = torch.arange(len(ids), device=ids.device)
    return block_loss(model, None, ids, rows, "ce", weight=1 / (len(ids) * (ids.shape[1] - 1)))


def step_of(training: Training, variant: str) -> Run:
    """A step of a fresh model."""
    model = build(training.size, training.device).train()
    model.config.use_cache = False
    prepare(model, variant)
    layers = model.model.layers
    if training.how != "eager":
        for module in layers if training.compile == "blocks" else [model]:
            module.compile(backend=training.backend)
    if training.sharded:
        mesh = init_device_mesh(training.device.type, (dist.get_world_size(),))
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if training.codes and not variant.startswith(TORCHAO):
            quantized_all_gather(model)
    optimizer = optimizer_of(training, model)
    ids = ids_of(training)

    def step() -> None:
        loss_of(training, model, ids).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if training.sharded:
            dist.barrier()

    return graphed(step, warm_up=3) if training.how == "graph" else step
