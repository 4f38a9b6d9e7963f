"""Small mixture-of-experts models of transformers, a family each."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    JetMoeConfig,
    JetMoeForCausalLM,
    Llama4ForCausalLM,
    LongcatFlashConfig,
    LongcatFlashForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.aria.configuration_aria import AriaTextConfig
from transformers.models.aria.modeling_aria import AriaTextForCausalLM
from transformers.models.llama4.configuration_llama4 import Llama4TextConfig

IDS = torch.arange(32).view(2, 16)
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 32,
    "num_experts_per_tok": 2,
}
RANKS = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
MODELS: dict[str, tuple[Any, Any]] = {
    "mixtral": (MixtralForCausalLM, MixtralConfig(**SIZES, num_local_experts=8)),
    "gpt-oss": (GptOssForCausalLM, GptOssConfig(**SIZES, num_local_experts=8, head_dim=16)),
    "qwen3-moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**SIZES, num_experts=8, moe_intermediate_size=64, head_dim=16)),
    "deepseek-v3": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config(
            **SIZES,
            **RANKS,
            n_routed_experts=8,
            n_group=1,
            topk_group=1,
            moe_intermediate_size=64,
            first_k_dense_replace=1,
        ),
    ),
}


_ONE = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
_PER_LAYER = {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 32}
_LONGCAT = {
    "ffn_hidden_size": 64,
    "expert_ffn_hidden_size": 32,
    "n_routed_experts": 4,
    "zero_expert_num": 1,
    "moe_topk": 2,
}
# whose routers or stacks are laid out otherwise
OTHERS: dict[str, tuple[Any, Any]] = {
    "gemma-4": (
        Gemma4ForCausalLM,
        Gemma4TextConfig(
            **{name: size for name, size in SIZES.items() if name != "num_experts_per_tok"}, **_PER_LAYER,
            enable_moe_block=True, num_experts=8, top_k_experts=2, moe_intermediate_size=64, head_dim=16, global_head_dim=16,
        ),
    ),
    "glm4-moe": (
        Glm4MoeForCausalLM,
        Glm4MoeConfig(**SIZES, n_routed_experts=8, moe_intermediate_size=64, first_k_dense_replace=1, head_dim=16),
    ),
    "llama-4": (
        Llama4ForCausalLM,
        Llama4TextConfig(**_ONE, **_HEADS, head_dim=16, intermediate_size_mlp=64, num_local_experts=4),
    ),
    "jetmoe": (
        JetMoeForCausalLM,
        JetMoeConfig(**_ONE, num_key_value_heads=2, kv_channels=16, num_local_experts=4, num_experts_per_tok=2),
    ),
    "aria": (AriaTextForCausalLM, AriaTextConfig(**_ONE, **_HEADS, moe_num_experts=4, moe_topk=2, pad_token_id=0)),
    "longcat-flash": (
        LongcatFlashForCausalLM,
        LongcatFlashConfig(
            hidden_size=64, vocab_size=64, num_hidden_layers=2, num_layers=1, num_attention_heads=4, num_key_value_heads=4,
            head_dim=16, **RANKS, **_LONGCAT,
        ),
    ),
}  # fmt: skip


def model_of(family: str) -> Any:
    model_class, config = (MODELS | OTHERS)[family]
    torch.manual_seed(0)
    own = copy.deepcopy(config)  # a model writes its implementations into its config
    model = model_class._from_config(own, dtype=torch.bfloat16)  # as loaders cast: rotary frequencies stay float32
    for name, p in model.named_parameters():
        if "experts" in name or "router" in name or "gate" in name:
            p.data.normal_(0, 0.1)
    return model


def write_mxfp4(folder: Path) -> None:
    """A folder as gpt-oss is published: random blocks, scales from 2^-9 to 2^-2, and a block of zeros under
    the smallest scale.
    """
    model = model_of("gpt-oss")
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    g = torch.Generator().manual_seed(4)
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        experts, k, rows = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, rows, k // 32, 16), generator=g, dtype=torch.uint8)
        blocks[0, 0, 0] = 0
        tensors[f"{name}_blocks"] = blocks
        scales = torch.randint(118, 126, blocks.shape[:3], generator=g, dtype=torch.uint8)
        scales[0, 0, 0] = 0
        tensors[f"{name}_scales"] = scales
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    left = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": left}
    (folder / "config.json").write_text(json.dumps(config))
