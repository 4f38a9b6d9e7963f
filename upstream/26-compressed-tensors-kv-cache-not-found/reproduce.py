"""kv_cache_scheme quantises no cache of transformers' models."""

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, apply_quantization_config
from transformers import LlamaConfig, LlamaForCausalLM

model = LlamaForCausalLM(
    LlamaConfig(vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
)
before = model(torch.arange(8)[None]).logits
scheme = QuantizationArgs(num_bits=8, type="float", strategy="tensor", dynamic=False, symmetric=True)
apply_quantization_config(model, QuantizationConfig(config_groups={}, kv_cache_scheme=scheme))
assert not hasattr(model.model.layers[0].self_attn, "k_scale")
assert torch.equal(model(torch.arange(8)[None]).logits, before)
