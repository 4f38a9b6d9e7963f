"""Prepared KV caches on two processes: DDP and FSDP2 compute the gradients and the scales of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.two_ranks import make
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from aoquant import KVCacheConfig, QATConfig, calibrate, quantize_
from aoquant.kv import hook

IDS = torch.randint(1, 97, (4, 12), generator=torch.Generator().manual_seed(1))
CONFIGS = {
    "fp8": KVCacheConfig("fp8", per="head", query="fp8"),
    "int8": KVCacheConfig("int8-token-head"),
}


def prepared(config: KVCacheConfig) -> Any:
    torch.manual_seed(0)
    sizes = LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM._from_config(sizes, dtype=torch.bfloat16)
    quantize_(model, QATConfig("int4-g32", kv_cache=config))
    return model


def step(model: Any, halves: list[torch.Tensor]) -> None:
    for ids in halves:
        model(input_ids=ids, labels=ids).loss.backward()


def wrapped(model: Any, kind: str) -> Any:
    if kind == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def trains_as_one_process(kind: str, rank: int, folder: Path) -> None:
    for config in CONFIGS.values():
        one, own = prepared(config), prepared(config)
        two = wrapped(own, kind)
        halves = list(IDS.chunk(2))
        if config.k_format.static:
            calibrate(one, [IDS])
            calibrate(own, [halves[rank]])
            for name, scale in hook.scales(one).items():
                assert torch.equal(own.get_buffer(name), scale) and not bool((scale == 1).all()), name
        step(two, [halves[rank]])
        step(one, halves)
        for (name, p), q in zip(one.named_parameters(), own.parameters(), strict=True):
            got = q.grad.full_tensor() if isinstance(q.grad, DTensor) else q.grad
            assert torch.equal(got, p.grad / 2), (kind, name)
        with torch.no_grad():
            before = two(input_ids=halves[rank]).logits
            quantize_(own, QATConfig(step="convert"))
            assert torch.equal(two(input_ids=halves[rank]).logits, before)
        dist.barrier()


def ddp(rank: int, folder: Path) -> None:
    trains_as_one_process("ddp", rank, folder)


def fsdp2(rank: int, folder: Path) -> None:
    trains_as_one_process("fsdp2", rank, folder)


def test_two_ranks_train_as_one_process() -> None:
    make({"ddp": ddp, "fsdp2": fsdp2})
