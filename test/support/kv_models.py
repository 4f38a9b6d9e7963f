"""Small models of four families with prepared KV caches, and what they compute."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from aoquant import KVCacheConfig, QATConfig, quantize_
from aoquant.kv import hook

SIZES = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
IDS = torch.randint(1, 97, (2, 12), generator=torch.Generator().manual_seed(1))
FAMILIES = ("llama", "qwen3", "gemma3", "deepseek_v3")
SOME_SLOW = [pytest.param(f, marks=() if f == "gemma3" else pytest.mark.slow) for f in FAMILIES]


def model(family: str = "llama", implementation: str = "eager"):
    torch.manual_seed(0)
    if family == "llama":
        config, kind = LlamaConfig(**SIZES), LlamaForCausalLM
    elif family == "qwen3":
        config, kind = Qwen3Config(**SIZES), Qwen3ForCausalLM
    elif family == "gemma3":
        kinds = ["sliding_attention", "full_attention", "sliding_attention"]
        config = Gemma3TextConfig(**SIZES, sliding_window=8, layer_types=kinds, query_pre_attn_scalar=32)
        kind = Gemma3ForCausalLM
    else:
        sizes = {**SIZES, "num_hidden_layers": 2, "num_key_value_heads": 4} | {"head_dim": 32}
        latent = {
            "kv_lora_rank": 32,
            "q_lora_rank": 32,
            "qk_rope_head_dim": 32,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
        }
        experts = {
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
        }
        config = DeepseekV3Config(**sizes, **latent, **experts, first_k_dense_replace=2)
        kind = DeepseekV3ForCausalLM
    config._attn_implementation = implementation
    return kind._from_config(config, dtype=torch.bfloat16).eval()


def prepared(family: str = "llama", implementation: str = "eager", **config):
    made = model(family, implementation)
    quantize_(made, QATConfig(KVCacheConfig(**{"format": "fp8", "scale": 0.0625} | config), step="prepare"))
    return made


def of(name: str) -> dict:
    static = name in ("fp8", "fp8-e5m2", "nvfp4")
    return (
        {"format": name, "scale": 2.0**-9 if name == "nvfp4" else 2.0**-4}
        if static
        else {"format": name, "scale": "pow2"}
    )


def recorded(made, **call):
    """Logits, and what reaches attention as keys and values in every layer."""
    seen = []
    original = hook.fake

    def record(x, *args):
        seen.append(original(x, *args))
        return seen[-1]

    hook.fake = record
    try:
        with torch.no_grad():
            out = made(IDS if "input_ids" not in call else call.pop("input_ids"), **call)
    finally:
        hook.fake = original
    return out, seen


def generated(made, **options):
    out = made.generate(
        IDS[:1, :9], max_new_tokens=4, do_sample=False, output_logits=True, return_dict_in_generate=True, **options
    )
    return out.sequences, torch.stack(out.logits), out.past_key_values if hasattr(out, "past_key_values") else out.cache
