"""A sharded save over a single file loads the old model."""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM

size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
old, new = (LlamaForCausalLM(LlamaConfig(**size, vocab_size=96)) for _ in range(2))
with tempfile.TemporaryDirectory() as over:
    old.save_pretrained(over)
    new.save_pretrained(over, max_shard_size="50KB")
    assert torch.equal(LlamaForCausalLM.from_pretrained(over).lm_head.weight, old.lm_head.weight)
