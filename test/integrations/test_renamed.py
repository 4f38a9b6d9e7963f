"""Models whose tensors have unusual names, and models that are no causal LM: saved, loaded, converted on disk.

torchao splits names at their last dot, and some models have parameters of their own (names without a dot).
`get_input_embeddings` raises for images, speech and pairs of encoders. transformers stores some tensors under other
names than the model's own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.bits import same_bytes
from support.models import llama_config
from torch import nn
from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict
from torchao.quantization import FqnToConfig

import aoquant
from aoquant.export.source import of_checkpoint
from aoquant.integrations.hf import input_embeddings
from aoquant.linear.tensor import same_bits

SEQ = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "vocab_size": 64,
    "max_position_embeddings": 32,
}
LAYERS = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
TEXT = {**LAYERS, "vocab_size": 64, "max_position_embeddings": 16}
IMAGE = {**LAYERS, "image_size": 8, "patch_size": 4}
SPEECH = {
    **LAYERS,
    "conv_dim": (32, 32),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "vocab_size": 32,
    "feat_extract_norm": "layer",
}
PAIR = {"text_config": TEXT, "vision_config": IMAGE, "projection_dim": 32}
OPT = {**TEXT, "model_type": "opt", "ffn_dim": 32, "word_embed_proj_dim": 32}
QFORMER = {**TEXT, "encoder_hidden_size": 32}
BLIP2 = {"vision_config": IMAGE, "qformer_config": QFORMER, "text_config": OPT, "num_query_tokens": 2}
AUDIO = {
    "num_mel_bins": 32,
    "spec_size": 32,
    "patch_size": 4,
    "patch_stride": [4, 4],
    "patch_embeds_hidden_size": 32,
    "depths": [1],
    "num_attention_heads": [2],
    "hidden_size": 32,
    "window_size": 4,
}
STAGES = {"hidden_sizes": [32] * 4, "depths": [1] * 4, "image_size": 32}
VISION = {**LAYERS, "image_size": 28, "patch_size": 14}
QWEN_TEXT = {**TEXT, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}}
QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
QWEN = {"text_config": QWEN_TEXT, "vision_config": QWEN_VISION}
LLAVA = {"vision_config": hf.CLIPVisionConfig(**VISION), "text_config": llama_config(**TEXT)}
GEMMA = {"text_config": {**TEXT, "head_dim": 16}, "vision_config": VISION}
# a stored name that is not the model's
RENAMED = {
    "llava": "language_model.model.layers.0.mlp.up_proj._weight_qdata",
    "gemma3": "language_model.model.layers.0.mlp.up_proj._weight_qdata",
    "qwen2.5-vl": "model.layers.0.mlp.up_proj._weight_qdata",
    "vit": "vit.encoder.layer.0.attention.attention.key._weight_qdata",
}
# name: (model, root tensors or not, input embeddings or not)
FAMILIES: dict[str, tuple[Callable[[], Any], bool, bool]] = {
    "bart": (lambda: hf.BartForConditionalGeneration(hf.BartConfig(**SEQ)), True, True),
    "marian": (lambda: hf.MarianMTModel(hf.MarianConfig(**SEQ, pad_token_id=1)), True, True),
    "mbart": (lambda: hf.MBartForConditionalGeneration(hf.MBartConfig(**SEQ)), True, True),
    "pegasus": (lambda: hf.PegasusForConditionalGeneration(hf.PegasusConfig(**SEQ)), True, True),
    "siglip": (lambda: hf.SiglipModel(hf.SiglipConfig(text_config=TEXT, vision_config=IMAGE)), True, True),
    "blip-2": (lambda: hf.Blip2ForConditionalGeneration(hf.Blip2Config(**BLIP2)), True, True),
    "clip": (lambda: hf.CLIPModel(hf.CLIPConfig(**PAIR)), True, False),
    "owlvit": (lambda: hf.OwlViTModel(hf.OwlViTConfig(**PAIR)), True, False),
    "clap": (
        lambda: hf.ClapModel(hf.ClapConfig(text_config=TEXT, audio_config=AUDIO, projection_dim=32)),
        True,
        False,
    ),
    "wav2vec2": (lambda: hf.Wav2Vec2Model(hf.Wav2Vec2Config(**SPEECH)), True, False),
    "wav2vec2 ctc": (lambda: hf.Wav2Vec2ForCTC(hf.Wav2Vec2Config(**SPEECH)), False, False),
    "convnext": (lambda: hf.ConvNextForImageClassification(hf.ConvNextConfig(**STAGES)), False, False),
    "llava": (lambda: hf.LlavaForConditionalGeneration(hf.LlavaConfig(**LLAVA)), False, True),
    "gemma3": (lambda: hf.Gemma3ForConditionalGeneration(hf.Gemma3Config(**GEMMA)), False, True),
    "qwen2.5-vl": (lambda: hf.Qwen2_5_VLForConditionalGeneration(hf.Qwen2_5_VLConfig(**QWEN)), False, True),
    "vit": (lambda: hf.ViTForImageClassification(hf.ViTConfig(**IMAGE)), False, True),
}
RECIPES = {"bart": ("mxfp4", "torchao-int8"), "clip": ("mxfp4", "torchao-int8"), "siglip": ("torchao-int8",)}
CASES = [(name, recipe) for name in FAMILIES for recipe in RECIPES.get(name, ("mxfp4",))]


def made(name: str) -> Any:
    torch.manual_seed(0)
    return FAMILIES[name][0]().eval()


def equal(a: nn.Module, b: nn.Module) -> bool:
    x, y = a.state_dict(), b.state_dict()
    return x.keys() == y.keys() and all(
        same_bits(x[n], y[n]) if hasattr(x[n], "tensor_data_names") else torch.equal(x[n], y[n]) for n in x
    )


def metadata_of(folder: Path) -> dict[str, str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        found: dict[str, str] = file.metadata()
    return found


@pytest.mark.parametrize(("name", "recipe"), CASES)
def test_saved_loaded_and_converted(name: str, recipe: str, tmp_path: Path) -> None:
    model = made(name)
    roots = {n for n in model.state_dict() if "." not in n}
    assert (bool(roots), input_embeddings(model) is not None) == FAMILIES[name][1:]
    floats, saved, converted = (tmp_path / n for n in ("float", "saved", "converted"))
    model.save_pretrained(floats)
    aoquant.quantize_(model, recipe)
    aoquant.save_pretrained(model, saved)
    loaded = aoquant.load_pretrained(saved, type(model))
    assert equal(loaded, model) and equal(type(model).from_pretrained(saved), model)
    aoquant.save_pretrained(loaded, again := tmp_path / "again")
    aoquant.convert_checkpoint(floats, recipe, converted)
    a, b, c = (load_file(folder / "model.safetensors") for folder in (saved, converted, again))
    assert a.keys() == b.keys() == c.keys()
    assert RENAMED.get(name, next(iter(a))) in a
    assert all(same_bytes(a[n], b[n]) and same_bytes(a[n], c[n]) for n in a)
    assert metadata_of(saved) == metadata_of(converted) == metadata_of(again)
    assert equal(aoquant.load_pretrained(converted, type(model)), model)


def test_torchaos_own_reader_takes_what_is_written(tmp_path: Path) -> None:
    model = made("bart")
    aoquant.quantize_(model, "torchao-int8")
    aoquant.save_pretrained(model, tmp_path)
    tensors, metadata = load_file(tmp_path / "model.safetensors"), metadata_of(tmp_path)
    rebuilt, left = unflatten_tensor_state_dict(tensors, metadata)
    weights = dict(model.named_parameters()).keys() - model.all_tied_weights_keys.keys()
    assert set(left) == {"final_logits_bias"} and weights <= set(rebuilt)


def test_a_folder_of_an_earlier_version_loads(tmp_path: Path) -> None:
    """Its metadata names root tensors among those to rebuild."""
    model = made("bart")
    aoquant.quantize_(model, "mxfp4")
    aoquant.save_pretrained(model, tmp_path)
    metadata = metadata_of(tmp_path)
    metadata.pop("aoquant_crc32")
    metadata["tensor_names"] = json.dumps([*json.loads(metadata["tensor_names"]), "final_logits_bias"])
    save_file(load_file(tmp_path / "model.safetensors"), tmp_path / "model.safetensors", metadata)
    assert equal(aoquant.load_pretrained(tmp_path, type(model)), model)


def test_an_embedding_of_a_model_without_input_embeddings_is_quantised(tmp_path: Path) -> None:
    model = made("clip")
    name = "text_model.embeddings.token_embedding"
    aoquant.quantize_(model, FqnToConfig({name: aoquant.MXFP4WeightConfig(activation=None)}))
    aoquant.save_pretrained(model, tmp_path)
    assert equal(aoquant.load_pretrained(tmp_path, type(model)), model)


def test_the_source_of_an_export_has_root_tensors(tmp_path: Path) -> None:
    config = hf.BartConfig(**{**SEQ, "is_encoder_decoder": False})
    torch.manual_seed(0)
    model = hf.BartForCausalLM(config).eval()
    model.register_buffer("root", torch.ones(2))
    aoquant.quantize_(model, "mxfp4")
    aoquant.save_pretrained(model, tmp_path)
    with pytest.raises(ValueError, match="differ in root"):
        of_checkpoint(tmp_path)  # the class has no such buffer: it is seen, and not lost without a word


@pytest.mark.parametrize("saved", [hf.T5ForConditionalGeneration, hf.LlamaModel], ids=["t5", "bare llama"])
def test_the_class_to_load_with_is_named(saved: Any, tmp_path: Path) -> None:
    t5 = hf.T5Config(d_model=64, d_ff=128, num_layers=1, num_heads=4, d_kv=16, vocab_size=100)
    model = saved._from_config(t5 if saved is hf.T5ForConditionalGeneration else llama_config(**TEXT))
    aoquant.quantize_(model, aoquant.Int8WeightConfig())
    aoquant.save_pretrained(model, tmp_path)
    with pytest.raises(ValueError, match=rf"transformers\.{saved.__name__}"):
        aoquant.load_pretrained(tmp_path)
    loaded = aoquant.load_pretrained(tmp_path, saved)
    assert type(loaded) is saved and equal(loaded, model)


def test_a_lost_part_of_a_renamed_tensor_is_noticed_before_loading(tmp_path: Path) -> None:
    model = made("llava")
    aoquant.quantize_(model, "mxfp4")
    aoquant.save_pretrained(model, tmp_path)
    tensors, metadata = load_file(tmp_path / "model.safetensors"), metadata_of(tmp_path)
    del tensors[RENAMED["llava"]]
    save_file(tensors, tmp_path / "model.safetensors", metadata)
    with pytest.raises(ValueError, match=r"\*\._weight_qdata"):
        aoquant.load_pretrained(tmp_path, type(model))
