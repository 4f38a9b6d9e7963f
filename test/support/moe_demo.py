"""A small mixture-of-experts model with the demo model's tokenizer, in shapes that vLLM's CPU build computes: attention
heads of 32, and two groups of 32 along every K on each of two ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "num_experts_per_tok": 2,
    "head_dim": 32,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, Any] = {
    "mixtral": (MixtralForCausalLM, MixtralConfig, {"num_local_experts": 8}),
    "qwen3-moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig, {"num_experts": 8, "moe_intermediate_size": 128}),
}


def moe_demo(family: str, vocabulary: int) -> Any:
    """Random weights, large enough that tokens go to all experts."""
    model_class, config_class, own = FAMILIES[family]
    torch.manual_seed(0)
    config = config_class(**SIZES, **own, vocab_size=vocabulary)
    model = model_class._from_config(config, dtype=torch.bfloat16).eval()
    for p in model.parameters():
        if p.dim() > 1:
            p.data.normal_(0, 0.08)
    return model
