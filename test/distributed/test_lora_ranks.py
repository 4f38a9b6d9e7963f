"""LoRA over a packed base that FSDP2 shards, beside one process that has both ranks' batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from support.models import llama_config
from support.two_ranks import make
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM

from aoquant import Int4WeightConfig, NVFP4WeightConfig, QATConfig, quantize_
from aoquant.linear.tensor import PackedTensor

IDS = torch.arange(16).view(2, 8)
CONFIGS = {"weights alone": Int4WeightConfig(32), "activations too": NVFP4WeightConfig()}


def base() -> Any:
    torch.manual_seed(0)
    size = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(llama_config(vocab_size=32, **size)).bfloat16()


def steps(model: Any, batches: list[int], ranks: int) -> list[torch.Tensor]:
    """The adapters after two steps, whose gradients are means over both batches."""
    torch.manual_seed(5)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    trained = [p for p in adapted.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    for step in range(2):
        for batch in batches:
            ids = (IDS + 7 * batch + step) % 32
            adapted(input_ids=ids, labels=ids).loss.backward()
        for p in trained:
            if ranks > 1:
                dist.all_reduce(p.grad)
            p.grad /= 2
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in trained]


def trains_as_one_process(rank: int, folder: Path) -> None:
    for config in CONFIGS.values():
        one, two = base(), base()
        quantize_(one, config)
        quantize_(two, QATConfig(config, step="prepare"))
        mesh = init_device_mesh("cpu", (2,))
        fully_shard(two.model.layers[0], mesh=mesh)
        fully_shard(two, mesh=mesh)
        quantize_(two, QATConfig(step="convert"))
        w = two.model.layers[0].mlp.up_proj.weight
        assert isinstance(w, DTensor) and isinstance(w.to_local(), PackedTensor) and w.to_local().shape == (32, 64)
        before = w.to_local().qdata.clone()
        for got, want in zip(steps(two, [rank], 2), steps(one, [0, 1], 1), strict=True):
            assert torch.equal(got, want)
        assert torch.equal(w.to_local().qdata, before)
        with pytest.raises(ValueError, match="shard the prepared model"):
            fully_shard(one.model.layers[0], mesh=mesh)


def test_lora_over_a_sharded_packed_base() -> None:
    make({"trains_as_one_process": trains_as_one_process})
