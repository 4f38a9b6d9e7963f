"""Recipes with a KV cache: wherever a recipe's name goes, the cache goes with the layers."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.convert_cases import assert_same_files
from torchao.quantization import FqnToConfig
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, TorchAoConfig

import aoquant
from aoquant import (
    KVCacheConfig,
    PackedTensor,
    QATConfig,
    calibrate,
    get_recipe,
    list_recipes,
    quantize_,
)
from aoquant.calibrate import uncalibrated
from aoquant.kv import hook
from aoquant.linear.prepared import PreparedModule, QATLinear
from aoquant.recipes import mixed

IDS = torch.randint(1, 97, (2, 12), generator=torch.Generator().manual_seed(1))
RECIPES = [r.name for r in list_recipes() if r.kv_cache]
FP8, FLAG = "vllm-w4a16-g128-kv-fp8", "gguf-q8_0-kv-q8_0"


def llama() -> Any:
    torch.manual_seed(0)
    sizes = LlamaConfig(
        vocab_size=97, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, max_position_embeddings=64, pad_token_id=0, dtype="bfloat16",
    )  # fmt: skip
    return LlamaForCausalLM._from_config(sizes, dtype=torch.bfloat16).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("float")
    llama().save_pretrained(out)
    return out


@pytest.mark.parametrize("name", RECIPES)
def test_trains_and_converts_layers_and_cache(name: str) -> None:
    plain, model = llama(), llama()
    quantize_(plain, QATConfig(name.partition("-kv-")[0]))
    quantize_(model, QATConfig(name))
    if uncalibrated(model):
        calibrate(model, [IDS])
    if uncalibrated(plain):
        calibrate(plain, [IDS])
    for fqn, layer in plain.named_modules():
        if isinstance(layer, QATLinear):
            own = model.get_submodule(fqn).prepared
            assert own.recipe == layer.prepared.recipe and own.config.scales == layer.prepared.config.scales
    before = model(IDS).logits
    assert not torch.equal(before, plain(IDS).logits)
    quantize_(model, QATConfig(name, step="convert"))
    assert torch.equal(model(IDS).logits, before)
    assert len(hook.quantised(model)) == 2 and model(IDS).cache.layers[0].keys.dtype == torch.uint8


def test_arguments_win_over_the_recipe() -> None:
    assert QATConfig(FP8).kv_cache == KVCacheConfig("fp8", query="fp8")
    assert QATConfig(FP8, kv_cache="q8_0").kv_cache == get_recipe(FP8).prepare(kv_cache="q8_0").kv_cache
    assert QATConfig(FP8, kv_cache="q8_0").kv_cache == KVCacheConfig("q8_0")


@pytest.mark.parametrize("trains", [False, True])
def test_layers_and_skip_keep_the_cache(trains: bool) -> None:
    model = llama()
    make = (lambda recipe: recipe.prepare()) if trains else (lambda recipe: recipe.make())
    quantize_(model, mixed(FLAG, ["re:.*mlp.*=int4-g32"], [r"re:.*layers\.0\.self_attn"], make=make))
    assert list(hook.quantised(model)) == ["model.layers.1.self_attn"]
    assert model.model.layers[1].self_attn.kv_quant.converted is not trains
    kind = QATLinear if trains else PackedTensor
    parts = [model.model.layers[0].mlp.up_proj, model.model.layers[0].self_attn.q_proj]
    assert all(isinstance(p if trains else p.weight, kind) for p in parts)
    names = {(p.prepared.recipe if trains else p.weight.recipe).fprop_weight.name for p in parts}
    assert names == {"int4-g32", "q8_0"}


def test_a_recipe_by_name() -> None:
    model = llama()
    quantize_(model, FqnToConfig({r"re:.*layers\.0\..*": "int4-g32", "_default": FLAG}))
    names = [m.self_attn.q_proj.weight.recipe.fprop_weight.name for m in model.model.layers]
    assert names == ["int4-g32", "q8_0"] and len(hook.quantised(model)) == 2
    with pytest.raises(ValueError, match=r"re:\.\*mlp.*has a KV cache"):
        quantize_(llama(), FqnToConfig({r"re:.*mlp.*": FLAG}))


def test_convert_takes_the_cache_of_prepare() -> None:
    model = llama()
    quantize_(model, QATConfig(FLAG))
    with pytest.raises(ValueError, match=r"layers\.\*\.self_attn.*prepared with.*q8_0.*int8"):
        quantize_(model, QATConfig(FLAG, kv_cache="int8-token-head", step="convert"))
    assert not model.model.layers[0].self_attn.kv_quant.converted
    quantize_(model, QATConfig(FLAG, step="convert"))


def test_convert_takes_the_caches_that_were_prepared_alone() -> None:
    """A module that was left out by name stays so, and a second convert finds none that is prepared."""
    model = llama()
    names = {"model.layers.1.self_attn": None, "_default": KVCacheConfig("int8-token-head")}
    quantize_(model, QATConfig(FqnToConfig(names), step="prepare"))
    assert not any(isinstance(m, PreparedModule) for m in model.modules())
    quantize_(model, QATConfig(step="convert"))
    assert hook.quantised(model).keys() == {"model.layers.0.self_attn"}
    assert model.model.layers[0].self_attn.kv_quant.converted
    with pytest.raises(ValueError, match="no KV cache to quantise"):
        quantize_(model, QATConfig(step="convert"))


def test_a_filter_chooses_layers() -> None:
    model = llama()
    quantize_(model, FLAG, lambda m, fqn: "mlp" in fqn)
    assert len(hook.quantised(model)) == 2
    assert isinstance(model.model.layers[0].mlp.up_proj.weight, PackedTensor)
    assert not isinstance(model.model.layers[0].self_attn.q_proj.weight, PackedTensor)


def test_a_cache_that_is_left_out_by_name_leaves_the_layers_to_the_filter() -> None:
    model = llama()
    both = QATConfig("int4-g32", kv_cache=KVCacheConfig("int8-token-head"), step="prepare")
    config = FqnToConfig({"model.layers.0.self_attn": None, "_default": both})
    quantize_(model, config, lambda m, fqn: "mlp" in fqn)
    assert hook.quantised(model).keys() == {"model.layers.1.self_attn"}
    prepared = [fqn for fqn, m in model.named_modules() if isinstance(m, QATLinear)]
    assert len(prepared) == 6 and all("mlp" in fqn for fqn in prepared)


def test_a_model_without_attention_is_refused() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(128, 128))
    for config in (FP8, QATConfig(FP8)):
        with pytest.raises(ValueError, match="no KV cache to quantise"):
            quantize_(model, config)
    assert type(model[0]) is torch.nn.Linear


@pytest.mark.parametrize("name", [FLAG, FP8])
def test_streamed_and_exported_as_in_memory(name: str, folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        quantize_(model, get_recipe(name).make())
        aoquant.convert_checkpoint(folder, name, tmp_path / "out")
    found = [str(w.message) for w in said]  # of scales that no text calibrated
    assert sum("KV-cache scales of 2" in text for text in found) == (2 if name == FP8 else 0)
    aoquant.save_pretrained(model, tmp_path / "whole")
    assert_same_files(tmp_path / "whole", tmp_path / "out")
    loaded = aoquant.load_pretrained(tmp_path / "out")
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    if name == FP8:
        aoquant.export(loaded, tmp_path / "a")
        aoquant.export(tmp_path / "out", tmp_path / "b")
        assert_same_files(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("name", [name for name in RECIPES if name.startswith("vllm-")])
def test_every_recipe_for_vllm_is_exported(name: str, tmp_path: Path) -> None:
    model = llama()
    quantize_(model, QATConfig(name))
    if uncalibrated(model):
        calibrate(model, [IDS])
    quantize_(model, QATConfig(step="convert"))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        aoquant.export(model, tmp_path / "out")
    flags = ["--kv-cache-dtype int8_per_token_head" in str(w.message) for w in said]
    assert any(flags) == (name.endswith("-int8"))
    again = aoquant.load_pretrained(tmp_path / "out")
    if not name.endswith("-int8"):  # a flag alone says it
        assert hook.scales(again).keys() == hook.scales(model).keys()
        assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_gptq_calibrates_the_cache() -> None:
    for step in (None, "prepare"):
        model = llama()
        aoquant.calibrate_ptq(model, [IDS], aoquant.CalibrateConfig(FP8), step=step)
        scale = model.model.layers[0].self_attn.k_scale
        floats = llama()
        quantize_(floats, QATConfig(KVCacheConfig("fp8", query="fp8")))
        calibrate(floats, [IDS])
        assert torch.equal(scale, floats.model.layers[0].self_attn.k_scale) and scale.item() != 1
        assert model.model.layers[0].self_attn.kv_quant.converted is (step is None)
        before = model(IDS).logits
        if step == "prepare":
            quantize_(model, QATConfig(step="convert"))
        assert torch.equal(model(IDS).logits, before) and model(IDS).cache.layers[0].keys.dtype == torch.uint8


def test_as_transformers_loads(folder: Path) -> None:
    asked = TorchAoConfig(get_recipe("vllm-w4a16-g128-kv-int8").make())
    for _ in range(2):  # the caller's config stays as it is
        model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=asked)
        other = AutoModelForCausalLM.from_pretrained(folder)
        quantize_(other, "vllm-w4a16-g128-kv-int8")
        assert len(hook.quantised(model)) == 2
        assert torch.equal(model(IDS).logits, other(IDS).logits)
    with pytest.raises(ValueError, match="KV caches alone"):
        AutoModelForCausalLM.from_pretrained(folder, quantization_config=TorchAoConfig(KVCacheConfig("q8_0")))
