"""LoRA with peft, both ways: adapters that end in the quantised weight, and adapters beside packed weights.

    python examples/lora.py

1. Prepare, add adapters, train: forward computes fake_quantize(W + s B A), so merging and converting changes nothing.
2. Quantise at once (PTQ), add adapters, train: the codes stay, and are deployed beside the adapter (QLoRA).
"""

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from aoquant import MXFP4WeightConfig, QATConfig, quantize_

IDS = torch.stack([(torch.arange(16) * step) % 64 for step in (1, 2, 3, 5)])
LORA = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2
    )
    return LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)


def train(model: nn.Module, steps: int = 8) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    for step in range(steps):
        loss = model(IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (0, steps - 1):
            print(f"  step {step}: loss {loss.item():.3f}")


def merged() -> None:
    model = tiny_llama()
    quantize_(model, QATConfig(MXFP4WeightConfig(activation=None), step="prepare"))  # first prepare, then adapters
    adapted = get_peft_model(model, LORA)
    train(adapted)
    with torch.no_grad():
        before = adapted.eval()(IDS).logits
        model = adapted.merge_and_unload()
        quantize_(model, QATConfig(step="convert"))
        assert torch.equal(model(IDS).logits, before)


def beside() -> None:
    model = tiny_llama()
    quantize_(model, MXFP4WeightConfig(activation=None))
    codes = model.model.layers[0].mlp.up_proj.weight.qdata.clone()
    adapted = get_peft_model(model, LORA)
    train(adapted)
    assert torch.equal(model.model.layers[0].mlp.up_proj.base_layer.weight.qdata, codes)


if __name__ == "__main__":
    print("adapters on a prepared model, merged and converted:")
    merged()
    print("adapters beside packed weights:")
    beside()
