"""Exported KV caches: scales under engines' names, the flags that files cannot hold, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

import aoquant
from aoquant import AoquantWarning, KVCacheConfig, QATConfig, calibrate, quantize_

IDS = torch.randint(1, 97, (2, 12), generator=torch.Generator().manual_seed(1))


def converted(base: str = "vllm-fp8", **config: Any) -> Any:
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
        assert torch.equal(scale, made.get_buffer(name)), name
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
    assert torch.equal(scales["model.layers.1.self_attn.k_proj.k_scale"], attention.k_scale)
    assert torch.equal(scales["model.layers.1.self_attn.v_proj.v_scale"], attention.v_scale)
    assert torch.equal(scales["model.layers.1.self_attn.q_scale"], attention.q_scale)


def test_flags_and_queries_are_said(tmp_path: Path) -> None:
    with pytest.warns(AoquantWarning, match="--kv-cache-dtype int8_per_token_head"):
        aoquant.export(converted(format="int8-token-head"), tmp_path / "int8")
    config, scales = written(tmp_path / "int8")
    assert not scales and config.get("kv_cache_scheme") is None
    with pytest.warns(AoquantWarning, match="vLLM casts queries"):
        aoquant.export(converted(), tmp_path / "fp8")


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


def test_caches_that_differ_are_refused(tmp_path: Path) -> None:
    made = converted()
    made.model.layers[1].self_attn.kv_quant = None
    for name in ("k_scale", "v_scale"):
        delattr(made.model.layers[1].self_attn, name)
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn.*quantise every"):
        aoquant.export(made, tmp_path / "out")
