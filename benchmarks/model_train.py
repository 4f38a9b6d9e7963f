"""A training step of a Llama on random tokens: forward, loss, backward, optimiser.

"compiled" compiles each decoder layer (as torchtitan does), or the whole model; the optimiser is PyTorch's fused AdamW
with moments in bf16, or plain SGD. It runs on one GPU, or sharded by FSDP2 under torchrun: every rank has tokens of its
own, each decoder layer is one unit of `fully_shard`, and the clock waits for all ranks. With `codes` the ranks gather
aoquant's weights as codes, where that is less than bf16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from beside import Run
from llamas import TORCHAO, Size, build, prepare
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, AdamW, Optimizer
from transformers import LlamaForCausalLM

from aoquant.integrations.distributed import quantized_all_gather

OPTIMIZERS = ("adamw", "sgd")


@dataclass(frozen=True)
class Training:
    """What a step is.

    how: "eager" or "compiled". compile: "blocks" or "whole". backend: torch.compile's. batch, tokens: of each rank.
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


def optimizer_of(training: Training, model: LlamaForCausalLM) -> Optimizer:
    if training.optimizer == "sgd":
        return SGD(model.parameters(), lr=1e-5)
    return AdamW(model.parameters(), lr=1e-5, fused=True)


def step_of(training: Training, variant: str) -> Run:
    """A step of a fresh model."""
    model = build(training.size, training.device).train()
    model.config.use_cache = False
    prepare(model, variant)
    layers = model.model.layers
    if training.how == "compiled":
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
    torch.manual_seed(1 + (dist.get_rank() if training.sharded else 0))
    ids = torch.randint(training.size.vocabulary, (training.batch, training.tokens), device=training.device)

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if training.sharded:
            dist.barrier()

    return step
