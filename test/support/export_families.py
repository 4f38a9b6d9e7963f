"""Tiny models of many families of transformers, most of them with biases, and an input for each."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig

from aoquant import PackedWeightConfig, quantize_

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}
ENCODER = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
VISION = {**ENCODER, "image_size": 28, "patch_size": 14}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GPT = {"n_embd": 64, "n_layer": 1, "n_head": 4, "vocab_size": 128, "n_positions": 64, **TOKENS}
ENCODER_DECODER = {
    **{"d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4},
    **{"decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 128},
    **{"decoder_start_token_id": 1, **TOKENS},
}
T5 = {"d_model": 64, "d_ff": 128, "num_layers": 1, "num_heads": 4, "d_kv": 16, "vocab_size": 128}
MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}}
IDS = torch.arange(5, 17).view(1, 12)
PIXELS = torch.linspace(-1, 1, 3 * 28 * 28).view(1, 3, 28, 28)


def with_image(token: int) -> Tensor:
    """Token ids with four tokens that an image stands for."""
    return torch.cat([IDS, torch.full((1, 4), token), IDS], 1)


@dataclass(frozen=True)
class Family:
    """A class of models. layers: linear layers that `quantize` quantises. config: arguments of its config. inputs: of a
    forward. initialised: of the layers, those whose weight transformers initialises by name.
    """

    model: str
    layers: int
    config: dict[str, Any]
    inputs: dict[str, Tensor] = field(default_factory=lambda: {"input_ids": IDS})
    initialised: int = 0


BOTH = {"input_ids": IDS, "decoder_input_ids": IDS}
FAMILIES = {
    "qwen2": Family("Qwen2ForCausalLM", 7, {**SIZES, "tie_word_embeddings": False}),
    "llama": Family("LlamaForCausalLM", 7, {**SIZES, "attention_bias": True, "mlp_bias": True}),
    "phi": Family("PhiForCausalLM", 6, ENCODER),
    "gpt-neox": Family("GPTNeoXForCausalLM", 4, ENCODER),
    "gpt-j": Family("GPTJForCausalLM", 6, {**GPT, "rotary_dim": 16}),
    "gpt-bigcode": Family("GPTBigCodeForCausalLM", 4, GPT, initialised=2),
    "opt": Family("OPTForCausalLM", 6, {**ENCODER, "ffn_dim": 64, "word_embed_proj_dim": 64, **TOKENS}),
    "bloom": Family("BloomForCausalLM", 4, {"hidden_size": 64, "n_layer": 1, "n_head": 4, "vocab_size": 128}),
    "falcon": Family("FalconForCausalLM", 1, {**ENCODER, "bias": True, "tie_word_embeddings": False}),
    "starcoder2": Family("Starcoder2ForCausalLM", 6, {**SIZES, "use_bias": True, **TOKENS}),
    "stablelm": Family("StableLmForCausalLM", 7, {**SIZES, "use_qkv_bias": True, **TOKENS}),
    "gpt-oss": Family(
        "GptOssForCausalLM", 4, {**SIZES, "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, **TOKENS}
    ),
    "qwen2-moe": Family(
        "Qwen2MoeForCausalLM",
        20,
        {
            **{**SIZES, **TOKENS, "num_experts": 4, "num_experts_per_tok": 2},
            **{"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
        },
    ),
    "gemma3": Family(
        "Gemma3ForConditionalGeneration",
        15,
        {
            **{"text_config": {**SIZES, "head_dim": 16}, "vision_config": VISION, "mm_tokens_per_image": 4},
            **{"boi_token_index": 120, "eoi_token_index": 121, "image_token_index": 122},
        },
        {"input_ids": with_image(122), "pixel_values": PIXELS, "token_type_ids": (with_image(122) == 122).long()},
        initialised=8,
    ),
    "qwen2-vl": Family(
        "Qwen2VLForConditionalGeneration",
        13,
        {
            "text_config": {**SIZES, **MROPE},
            "vision_config": {"depth": 1, "embed_dim": 64, "hidden_size": 64, "num_heads": 4},
        },
    ),
    "llava": Family(
        "LlavaForConditionalGeneration",
        15,
        {
            "text_config": {**SIZES, "model_type": "llama"},
            "vision_config": {**VISION, "model_type": "clip_vision_model"},
            "image_token_index": 120,
        },
        {"input_ids": with_image(120), "pixel_values": PIXELS},
    ),
    "bert": Family("BertForMaskedLM", 6, ENCODER),
    "roberta": Family("RobertaForMaskedLM", 6, ENCODER),
    "vit": Family("ViTForImageClassification", 6, VISION, {"pixel_values": PIXELS}),
    "clip": Family(
        "CLIPModel",
        14,
        {"text_config": {**ENCODER, **TOKENS}, "vision_config": VISION, "projection_dim": 64},
        {"input_ids": IDS, "pixel_values": PIXELS},
    ),
    "siglip": Family(
        "SiglipModel",
        15,
        {"text_config": {**ENCODER, **TOKENS, "projection_size": 64}, "vision_config": VISION},
        {"input_ids": IDS, "pixel_values": PIXELS},
        initialised=15,
    ),
    "t5": Family("T5ForConditionalGeneration", 16, {**T5, "decoder_start_token_id": 0}, BOTH, initialised=16),
    "bart": Family("BartForConditionalGeneration", 16, {**ENCODER_DECODER, "max_position_embeddings": 64}, BOTH),
    "whisper": Family(
        "WhisperForConditionalGeneration",
        16,
        {**ENCODER_DECODER, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32},
        {"input_features": torch.linspace(-1, 1, 8 * 32).view(1, 8, 32), "decoder_input_ids": IDS},
    ),
    "wav2vec2": Family(
        "Wav2Vec2ForCTC",
        7,
        {
            **{**ENCODER, **TOKENS, "conv_dim": (32, 32), "conv_kernel": (8, 4), "conv_stride": (4, 2)},
            **{"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2},
        },
        {"input_values": torch.linspace(-9, 9, 400).sin().view(1, 400)},
        initialised=1,
    ),
}


def config_of(family: str) -> PretrainedConfig:
    """A config of the family's own."""
    config: PretrainedConfig = getattr(transformers, FAMILIES[family].model).config_class(**FAMILIES[family].config)
    return config


def float_model(family: str, folder: Path) -> Any:
    """The family's model as transformers loads it from `folder`, where it is written; biases and sinks are no zeros."""
    kind = getattr(transformers, FAMILIES[family].model)
    torch.manual_seed(0)
    model = kind._from_config(config_of(family), dtype=torch.bfloat16)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 1 or "bias" in name:
                p.add_(torch.randn(p.shape, dtype=p.dtype), alpha=0.3)
    model.save_pretrained(folder)
    return kind.from_pretrained(folder, disable_mmap=True).eval()


def quantize(family: str, model: Any, weight: str) -> None:
    """Pack the linear layers that are no head and no experts of one tensor; of Falcon, whose others are subclasses, the
    head.
    """

    def chosen(module: torch.nn.Module, fqn: str) -> bool:
        if family == "falcon":
            return fqn == "lm_head"
        return isinstance(module, torch.nn.Linear) and fqn not in ("lm_head", "classifier")

    asked = chosen if family in ("falcon", "gpt-oss", "vit") else None
    quantize_(model, PackedWeightConfig(weight, contract="dequantize"), asked)


@torch.no_grad()
def outputs(family: str, model: Any) -> Tensor:
    """Logits of the family's input."""
    inputs = {n: t.to(model.dtype) if t.is_floating_point() else t for n, t in FAMILIES[family].inputs.items()}
    found = model(**inputs)
    logits: Tensor = found.logits_per_image if "logits_per_image" in found else found.logits
    return logits
