"""Models whose tensors transformers stores under other names than the model's own, and models that are no causal LM:
saved, loaded and converted like any other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from support.convert_cases import assert_same_files
from support.models import SMALL, llama_config
from transformers import (
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlamaModel,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from aoquant import Int8WeightConfig, convert_checkpoint, load_pretrained, quantize_, save_pretrained
from aoquant.integrations import checkpoint

TEXT = SMALL | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 100}
VISION: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_TEXT = {**TEXT, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}}
QWEN_VISION = {"depth": 1, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 64}
MODELS: dict[str, tuple[Any, Any, str]] = {  # class, config, a stored name that is not the model's
    "llava": (
        LlavaForConditionalGeneration,
        LlavaConfig(vision_config=CLIPVisionConfig(**VISION), text_config=llama_config(**TEXT)),
        "language_model.model.layers.0.mlp.up_proj._weight_qdata",
    ),
    "gemma3": (
        Gemma3ForConditionalGeneration,
        Gemma3Config(text_config={**TEXT, "head_dim": 16}, vision_config=VISION),
        "language_model.model.layers.0.mlp.up_proj._weight_qdata",
    ),
    "qwen2.5-vl": (
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLConfig(text_config=QWEN_TEXT, vision_config=QWEN_VISION),
        "model.layers.0.mlp.up_proj._weight_qdata",
    ),
    "vit": (
        ViTForImageClassification,
        ViTConfig(**VISION),
        "vit.encoder.layer.0.attention.attention.key._weight_qdata",
    ),
}


def make(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    kind, config, _ = MODELS[name]
    model: PreTrainedModel = kind._from_config(config, dtype=torch.bfloat16).eval()
    return model


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    if isinstance(model, ViTForImageClassification):
        return model(torch.linspace(-1, 1, 3 * 28 * 28, dtype=torch.bfloat16).view(1, 3, 28, 28)).logits
    return model(input_ids=torch.arange(5, 17).view(1, 12)).logits


@pytest.mark.parametrize("name", MODELS)
def test_saved_loaded_and_converted_bit_equal(name: str, tmp_path: Path) -> None:
    kind, _, stored = MODELS[name]
    make(name).save_pretrained(tmp_path / "float")
    model = kind.from_pretrained(tmp_path / "float", disable_mmap=True).eval()
    quantize_(model, Int8WeightConfig())
    save_pretrained(model, tmp_path / "long", max_shard_size="40KB")
    convert_checkpoint(tmp_path / "float", Int8WeightConfig(), tmp_path / "short", max_shard_size="40KB", verify=99)
    assert_same_files(tmp_path / "long", tmp_path / "short")

    loaded = load_pretrained(tmp_path / "short", kind).eval()
    assert torch.equal(logits(loaded), logits(model))
    save_pretrained(loaded, tmp_path / "again", max_shard_size="40KB")
    assert_same_files(tmp_path / "long", tmp_path / "again")

    names: set[str] = set()
    for path in (tmp_path / "short").glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names.update(file.keys())
    assert stored in names


@pytest.mark.parametrize(
    ("saved", "config"),
    [
        (
            T5ForConditionalGeneration,
            T5Config(d_model=64, d_ff=128, num_layers=1, num_heads=4, d_kv=16, vocab_size=100),
        ),
        (LlamaModel, llama_config(**TEXT)),
    ],
    ids=["t5", "bare llama"],
)
def test_the_class_to_load_with_is_named(saved: Any, config: Any, tmp_path: Path) -> None:
    model = saved._from_config(config, dtype=torch.bfloat16)
    quantize_(model, Int8WeightConfig())
    save_pretrained(model, tmp_path)
    wanted = rf"holds a {saved.__name__}, so give model_class=transformers.{saved.__name__}"
    with pytest.raises(ValueError, match=wanted):
        load_pretrained(tmp_path)
    assert type(load_pretrained(tmp_path, saved)) is saved


def test_a_lost_part_is_noticed_before_loading(tmp_path: Path) -> None:
    kind, _, stored = MODELS["llava"]
    model = make("llava")
    quantize_(model, Int8WeightConfig())
    save_pretrained(model, tmp_path / "m")
    path = tmp_path / "m" / checkpoint.SINGLE
    with safe_open(path, framework="pt") as file:
        tensors, metadata = {k: file.get_tensor(k) for k in file.keys()}, file.metadata()  # noqa: SIM118
    del tensors[stored]
    save_file(tensors, path, metadata)
    with pytest.raises(
        ValueError, match=r"incomplete, 1 of the tensors called \*\._weight_qdata missing: copy or save"
    ):
        load_pretrained(tmp_path / "m", kind)
