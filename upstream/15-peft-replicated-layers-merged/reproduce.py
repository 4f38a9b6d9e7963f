"""Layers that are replicated are merged into one weight."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM


def decibels(y: torch.Tensor, want: torch.Tensor) -> float:
    y, want = y.detach().float(), want.detach().float()
    return float(10 * torch.log10(want.square().sum() / (y - want).square().sum()))


size = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
options = {"target_modules": ["q_proj"], "layer_replication": [[0, 2], [1, 2]], "init_lora_weights": False}
model = get_peft_model(LlamaForCausalLM(LlamaConfig(**size)), LoraConfig(**options)).eval()
tokens = torch.arange(8)[None]
with torch.no_grad():
    adapted = model(tokens).logits
    merged = model.merge_and_unload()(tokens).logits
assert decibels(merged, adapted) < 40  # a correct merge has more than 100
