"""A forward reads values back although the model made the position ids itself."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig


class ReadsBack(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        global read
        read += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
found = []
for config in (LlamaConfig, Gemma3TextConfig):
    model = AutoModelForCausalLM.from_config(config(**sizes, head_dim=16, num_hidden_layers=6, vocab_size=32))
    read = 0
    with ReadsBack():
        model(input_ids=torch.arange(16)[None], use_cache=False)
    found.append(read)
assert found == [1, 2], found
