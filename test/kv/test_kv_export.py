"""Exported KV caches: scales under engines' names, the flags that files cannot hold, and what is refused."""

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file, save_file
from support import kv_models
from torchao.quantization import FqnToConfig
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

import aoquant
from aoquant import AoquantWarning, KVCacheConfig, PackedWeightConfig, QATConfig, calibrate, quantize_
from aoquant.kv import hook

IDS = torch.randint(1, 97, (2, 12), generator=torch.Generator().manual_seed(1))


def converted(base: str | None = "vllm-fp8", **config: Any) -> Any:
    torch.manual_seed(0)
    sizes = LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    made = LlamaForCausalLM._from_config(sizes, dtype=torch.bfloat16).eval()
    cache = KVCacheConfig(**config)
    quantize_(made, QATConfig(base, kv_cache=cache))
    if cache.k_format.static and isinstance(cache.scale, str):
        calibrate(made, [IDS])
    quantize_(made, QATConfig(step="convert"))
    return made


def written(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    tensors = load_file(folder / "model.safetensors")
    return config, {name: t for name, t in tensors.items() if name[-7:] in ("k_scale", "v_scale", "q_scale")}


def held(name: str) -> str:
    """The parameter of vLLM's model that a scale belongs to."""
    return f"{name.partition('.self_attn.')[0]}.self_attn.attn.{name.rpartition('.')[2]}"


@pytest.mark.parametrize("per", ["tensor", "head"])
def test_compressed_tensors(per: str, tmp_path: Path) -> None:
    made = converted(per=per, query="fp8")
    aoquant.export(made, tmp_path / "out")
    config, scales = written(tmp_path / "out")
    scheme = QuantizationConfig.model_validate(config).kv_cache_scheme
    assert (scheme.num_bits, scheme.type, scheme.dynamic) == (8, "float", False)
    assert scheme.strategy == ("attn_head" if per == "head" else "tensor")
    assert len(scales) == 6
    for name, scale in scales.items():
        assert torch.equal(scale, made.get_buffer(name).expand_as(scale)), name
        assert re.sub(r"(?<!\.attn)\.([qkv])_scale$", r".attn.\1_scale", name) == held(name)  # as vLLM renames it
        wanted = {"q_scale": 4, "k_scale": 2, "v_scale": 2} if per == "head" else {}  # vLLM's loader views them so
        assert scale.numel() == wanted.get(name.rpartition(".")[2], 1), name
    again = aoquant.load_pretrained(tmp_path / "out")
    assert torch.equal(again(IDS).logits, made(IDS).logits)
    assert again(IDS).cache.layers[0].keys.dtype == torch.uint8


def test_modelopt(tmp_path: Path) -> None:
    made = converted("vllm-nvfp4-weight", query="fp8")
    aoquant.export(made, tmp_path / "out", format="modelopt")
    config, scales = written(tmp_path / "out")
    assert config["kv_cache_quant_algo"] == "FP8"
    own = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())
    assert own["quantization"]["kv_cache_quant_algo"] == "FP8"
    attention = made.model.layers[1].self_attn
    for name in scales:
        of_projection = re.sub(r"\.self_attn\.[kv]_proj\.([kv])_scale$", r".self_attn.attn.\1_scale", name)
        assert re.sub(r"(?<!\.attn)\.([qkv])_scale$", r".attn.\1_scale", of_projection) == held(name)
    assert torch.equal(scales["model.layers.1.self_attn.k_proj.k_scale"], attention.k_scale)
    assert torch.equal(scales["model.layers.1.self_attn.v_proj.v_scale"], attention.v_scale)
    assert torch.equal(scales["model.layers.1.self_attn.q_scale"], attention.q_scale)


def test_scales_beside_a_fused_projection_are_the_attentions(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    made: Any = Phi3ForCausalLM._from_config(Phi3Config(vocab_size=97, pad_token_id=0, **sizes), dtype=torch.bfloat16)
    quantize_(made.eval(), QATConfig("vllm-nvfp4-weight", kv_cache=KVCacheConfig(query="fp8")))
    calibrate(made, [IDS])
    quantize_(made, QATConfig(step="convert"))
    _, scales = written(aoquant.export(made, tmp_path / "out", format="modelopt"))
    assert scales.keys() == {f"model.layers.0.self_attn.{of}_scale" for of in "kvq"}


def test_a_cache_alone(tmp_path: Path) -> None:
    """Layers stay float: a scheme without groups, or nothing that a file could say."""
    made = converted(None, query="fp8")
    aoquant.export(made, tmp_path / "out")
    config, scales = written(tmp_path / "out")
    assert config["config_groups"] == {} and config["format"] == "dense" and len(scales) == 6
    again = aoquant.load_pretrained(tmp_path / "out")
    assert torch.equal(again(IDS).logits, made(IDS).logits)
    assert again(IDS).cache.layers[0].keys.dtype == torch.uint8
    for target, cache in (
        ("modelopt", {}),
        ("gguf", {"format": "q8_0"}),
        ("compressed-tensors", {"format": "int8-token-head"}),
    ):
        with pytest.raises(ValueError, match="layers are float"):
            aoquant.export(converted(None, **cache), tmp_path / "none", format=target)
        assert not (tmp_path / "none").exists()


def test_flags_and_queries_are_said(tmp_path: Path) -> None:
    with pytest.warns(AoquantWarning, match="--kv-cache-dtype int8_per_token_head"):
        aoquant.export(converted(format="int8-token-head"), tmp_path / "int8")
    config, scales = written(tmp_path / "int8")
    assert not scales and config.get("kv_cache_scheme") is None
    with pytest.warns(AoquantWarning, match="vLLM casts queries"):
        aoquant.export(converted(), tmp_path / "fp8")


@pytest.mark.parametrize(
    ("config", "base", "target"),
    [
        ({"query": "fp8"}, "vllm-fp8", "compressed-tensors"),
        ({"query": "fp8"}, "vllm-nvfp4-weight", "modelopt"),
        ({"format": "nvfp4", "scale": 1.0}, "vllm-nvfp4-weight", "modelopt"),
    ],
)
def test_nothing_is_said_of_a_cache_that_engines_compute(
    config: dict[str, Any], base: str, target: str, tmp_path: Path
) -> None:
    made = converted(base, **config)
    with warnings.catch_warnings(action="error", category=AoquantWarning):
        aoquant.export(made, tmp_path / "out", format=target)


def test_scales_of_a_cache_are_float32_whatever_the_model_is(tmp_path: Path) -> None:
    made = converted(query="fp8")
    for module in hook.quantised(made).values():
        for name in [n for n in hook.SCALES if n in module._buffers]:
            module.register_buffer(name, module.get_buffer(name).half())
    _, scales = written(aoquant.export(made, tmp_path / "out"))
    assert len(scales) == 6 and {t.dtype for t in scales.values()} == {torch.float32}


@pytest.mark.parametrize(
    ("config", "target", "match"),
    [
        ({"format": "q8_0"}, "compressed-tensors", "keys as q8_0"),
        ({"format": "fp8", "value": "int8-token-head"}, "compressed-tensors", "one format for both"),
        ({"format": "nvfp4", "scale": 0.5}, "modelopt", "SGLang multiplies its scale by 6"),
        ({"format": "nvfp4", "scale": 1.0}, "compressed-tensors", "format='modelopt'"),
        ({"per": "head"}, "modelopt", "one scale for a cache"),
    ],
)
def test_refusals(config: dict[str, Any], target: str, match: str, tmp_path: Path) -> None:
    base = "vllm-nvfp4-weight" if target == "modelopt" else "vllm-fp8"
    with pytest.raises(ValueError, match=match):
        aoquant.export(converted(base, **config), tmp_path / "out", format=target)
    assert not (tmp_path / "out").exists()


def latent(scale: float) -> Any:
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, head_dim=32,
        num_key_value_heads=4, kv_lora_rank=32, q_lora_rank=32, qk_rope_head_dim=32, qk_nope_head_dim=16, v_head_dim=16,
        moe_intermediate_size=32, n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1, pad_token_id=0,
    )  # fmt: skip
    made = DeepseekV3ForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
    quantize_(
        made,
        FqnToConfig(
            {
                r"re:.*self_attn": KVCacheConfig("fp8", scale),
                r"re:.*mlp\..*": PackedWeightConfig("fp8-row", "fp8-row-vllm"),
            }
        ),
    )
    return made


@pytest.mark.parametrize("target", ["compressed-tensors", "modelopt"])
def test_latent_attention_is_exported_without_scales_alone(target: str, tmp_path: Path) -> None:
    """vLLM drops the scales of latent attention, under any name."""
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn.*vLLM loads no scales"):
        aoquant.export(latent(0.5), tmp_path / "out", format=target)
    if target == "compressed-tensors":
        with pytest.warns(AoquantWarning, match="--kv-cache-dtype fp8"):
            aoquant.export(latent(1.0), tmp_path / "out")
        config, scales = written(tmp_path / "out")
        assert not scales and config.get("kv_cache_scheme") is None


def test_a_scale_for_each_query_head_is_said_not_to_be_computed(tmp_path: Path) -> None:
    aoquant.export(converted(per="head", query="fp8"), tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.self_attn.q_scale"][1] *= 2
    save_file(tensors, path, {"format": "pt"})
    with pytest.warns(AoquantWarning, match="queries have a scale for each head"):
        again = aoquant.load_pretrained(tmp_path / "out", verify_checksums=False)
    assert again(IDS).cache.layers[0].keys.dtype == torch.bfloat16


def test_caches_that_differ_are_refused(tmp_path: Path) -> None:
    made = converted()
    made.model.layers[1].self_attn.kv_quant = None
    for name in ("k_scale", "v_scale"):
        delattr(made.model.layers[1].self_attn, name)
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn.*quantise every"):
        aoquant.export(made, tmp_path / "out")


@pytest.mark.parametrize("family", [pytest.param("qwen3", marks=pytest.mark.slow), "gemma3"])
def test_families(family: str, tmp_path: Path) -> None:
    """Norms of queries and keys, and sliding layers, change no name; compressed-tensors' reader finds every scale."""
    made = kv_models.model(family)
    quantize_(made, QATConfig("vllm-fp8", kv_cache=KVCacheConfig(query="fp8"), step="prepare"))
    calibrate(made, [IDS])
    quantize_(made, QATConfig(step="convert"))
    aoquant.export(made, tmp_path / "out")
    _, scales = written(tmp_path / "out")
    assert {name: float(scale) for name, scale in scales.items()} == {n: float(s) for n, s in hook.scales(made).items()}
    again = aoquant.load_pretrained(tmp_path / "out")
    again.set_attn_implementation(made.config._attn_implementation)
    assert torch.equal(again(IDS).logits, made(IDS).logits)
    assert all(layer.keys.dtype == torch.uint8 for layer in again(IDS).cache.layers)
