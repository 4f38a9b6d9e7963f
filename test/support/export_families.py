"""Tiny models of many families of transformers, most of them with biases, and an input for each."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

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
    """A class of models. config: its config's class and arguments. inputs: of a forward. layers: linear layers that
    `quantize` quantises. initialised: of these, the layers whose weight transformers initialises by name.
    """

    model: str
    config: tuple[str, dict[str, Any]]
    layers: int
    inputs: dict[str, Tensor] = field(default_factory=lambda: {"input_ids": IDS})
    initialised: int = 0


BOTH = {"input_ids": IDS, "decoder_input_ids": IDS}
FAMILIES = {
    "qwen2": Family("Qwen2ForCausalLM", ("Qwen2Config", {**SIZES, "tie_word_embeddings": False}), 7),
    "llama": Family("LlamaForCausalLM", ("LlamaConfig", {**SIZES, "attention_bias": True, "mlp_bias": True}), 7),
    "phi": Family("PhiForCausalLM", ("PhiConfig", ENCODER), 6),
    "gpt-neox": Family("GPTNeoXForCausalLM", ("GPTNeoXConfig", ENCODER), 4),
    "gpt-j": Family("GPTJForCausalLM", ("GPTJConfig", {**GPT, "rotary_dim": 16}), 6),
    "gpt-bigcode": Family("GPTBigCodeForCausalLM", ("GPTBigCodeConfig", GPT), 4, initialised=2),
    "opt": Family("OPTForCausalLM", ("OPTConfig", {**ENCODER, "ffn_dim": 64, "word_embed_proj_dim": 64, **TOKENS}), 6),
    "bloom": Family(
        "BloomForCausalLM", ("BloomConfig", {"hidden_size": 64, "n_layer": 1, "n_head": 4, "vocab_size": 128}), 4
    ),
    "falcon": Family("FalconForCausalLM", ("FalconConfig", {**ENCODER, "bias": True, "tie_word_embeddings": False}), 1),
    "starcoder2": Family("Starcoder2ForCausalLM", ("Starcoder2Config", {**SIZES, "use_bias": True, **TOKENS}), 6),
    "stablelm": Family("StableLmForCausalLM", ("StableLmConfig", {**SIZES, "use_qkv_bias": True, **TOKENS}), 7),
    "gpt-oss": Family(
        "GptOssForCausalLM",
        ("GptOssConfig", {**SIZES, "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, **TOKENS}),
        4,
    ),
    "qwen2-moe": Family(
        "Qwen2MoeForCausalLM",
        (
            "Qwen2MoeConfig",
            {
                **{**SIZES, **TOKENS, "num_experts": 4, "num_experts_per_tok": 2},
                **{"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
            },
        ),
        20,
    ),
    "gemma3": Family(
        "Gemma3ForConditionalGeneration",
        (
            "Gemma3Config",
            {
                **{"text_config": {**SIZES, "head_dim": 16}, "vision_config": VISION, "mm_tokens_per_image": 4},
                **{"boi_token_index": 120, "eoi_token_index": 121, "image_token_index": 122},
            },
        ),
        15,
        {
            "input_ids": with_image(122),
            "pixel_values": PIXELS,
            "token_type_ids": (with_image(122) == 122).long(),
        },
        initialised=8,
    ),
    "qwen2-vl": Family(
        "Qwen2VLForConditionalGeneration",
        (
            "Qwen2VLConfig",
            {
                "text_config": {**SIZES, **MROPE},
                "vision_config": {"depth": 1, "embed_dim": 64, "hidden_size": 64, "num_heads": 4},
            },
        ),
        13,
    ),
    "llava": Family(
        "LlavaForConditionalGeneration",
        (
            "LlavaConfig",
            {
                "text_config": {**SIZES, "model_type": "llama"},
                "vision_config": {**VISION, "model_type": "clip_vision_model"},
                "image_token_index": 120,
            },
        ),
        15,
        {"input_ids": with_image(120), "pixel_values": PIXELS},
    ),
    "bert": Family("BertForMaskedLM", ("BertConfig", ENCODER), 6),
    "roberta": Family("RobertaForMaskedLM", ("RobertaConfig", ENCODER), 6),
    "vit": Family("ViTForImageClassification", ("ViTConfig", VISION), 6, {"pixel_values": PIXELS}),
    "clip": Family(
        "CLIPModel",
        ("CLIPConfig", {"text_config": {**ENCODER, **TOKENS}, "vision_config": VISION, "projection_dim": 64}),
        14,
        {"input_ids": IDS, "pixel_values": PIXELS},
    ),
    "siglip": Family(
        "SiglipModel",
        ("SiglipConfig", {"text_config": {**ENCODER, **TOKENS, "projection_size": 64}, "vision_config": VISION}),
        15,
        {"input_ids": IDS, "pixel_values": PIXELS},
        initialised=15,
    ),
    "t5": Family(
        "T5ForConditionalGeneration", ("T5Config", {**T5, "decoder_start_token_id": 0}), 16, BOTH, initialised=16
    ),
    "bart": Family(
        "BartForConditionalGeneration", ("BartConfig", {**ENCODER_DECODER, "max_position_embeddings": 64}), 16, BOTH
    ),
    "whisper": Family(
        "WhisperForConditionalGeneration",
        (
            "WhisperConfig",
            {**ENCODER_DECODER, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32},
        ),
        16,
        {"input_features": torch.linspace(-1, 1, 8 * 32).view(1, 8, 32), "decoder_input_ids": IDS},
    ),
    "wav2vec2": Family(
        "Wav2Vec2ForCTC",
        (
            "Wav2Vec2Config",
            {
                **{**ENCODER, **TOKENS, "conv_dim": (32, 32), "conv_kernel": (8, 4), "conv_stride": (4, 2)},
                **{"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2},
            },
        ),
        7,
        {"input_values": torch.linspace(-9, 9, 400).sin().view(1, 400)},
        initialised=1,
    ),
}


def float_model(family: str, folder: Path) -> Any:
    """The family's model as transformers loads it from `folder`, where it is written; biases and sinks are no zeros."""
    f = FAMILIES[family]
    kind, (config, arguments) = getattr(transformers, f.model), f.config
    torch.manual_seed(0)
    model = kind._from_config(getattr(transformers, config)(**arguments), dtype=torch.bfloat16)
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
