"""Test what exports of many families hold: each tensor of the float checkpoint, by its name there, with its values or,
of a quantised layer, its codes; and what stock transformers computes with it.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.export_cases import byte_level, told
from support.export_families import FAMILIES, IDS, float_model, outputs, quantize
from torch import Tensor, nn

from aoquant import AoquantWarning, PackedWeightConfig, cli, export, load_pretrained, quantize_, save_pretrained

CODES = {"compressed-tensors": "weight_packed", "modelopt": "weight"}
BESIDE = ("weight_scale", "weight_scale_2", "weight_shape")


def check_file(folder: Path, floats: dict[str, Tensor], layout: str, layers: int) -> None:
    """Every float tensor is in the file, with its name and values, or as codes with their scales, and nothing else."""
    stored = load_file(folder / "model.safetensors")
    quantised = {name.removesuffix(".weight_scale") for name in stored if name.endswith(".weight_scale")}
    assert len(quantised) == layers
    beside = {f"{layer}.{part}" for layer in quantised for part in (CODES[layout], *BESIDE)}
    codes = {f"{layer}.weight" for layer in quantised}
    assert codes <= floats.keys()
    assert stored.keys() - beside == floats.keys() - codes
    for name in floats.keys() - codes:
        assert torch.equal(stored[name], floats[name]), name
    for layer in quantised:
        per_byte = {"compressed-tensors": 8, "modelopt": 2}[layout]
        rows, k = floats[f"{layer}.weight"].shape
        assert stored[f"{layer}.{CODES[layout]}"].shape == (rows, k // per_byte)
        assert stored[f"{layer}.weight_scale"].shape[0] == rows


@pytest.mark.parametrize("family", FAMILIES)
def test_stock_transformers_finds_every_tensor(family: str, tmp_path: Path) -> None:
    known = FAMILIES[family]
    model = float_model(family, tmp_path / "float")
    floats = load_file(tmp_path / "float" / "model.safetensors")
    quantize(family, model, "intx4-g32")
    with warnings.catch_warnings(record=True, action="always", category=AoquantWarning) as caught:
        out = export(model, tmp_path / "out")
    said = [str(w.message) for w in caught if "transformers cannot load the folder" in str(w.message)]
    assert len(said) == bool(known.initialised)
    check_file(out, floats, "compressed-tensors", known.layers)
    again = load_pretrained(out, type(model)).eval()
    expected = outputs(family, model)
    assert torch.equal(outputs(family, again), expected)
    if known.initialised:
        assert f"{known.initialised} layer(s)" in said[0]
        return
    stock, info = type(model).from_pretrained(out, output_loading_info=True)
    assert not any(info.values()), info
    assert torch.equal(outputs(family, stock.eval()), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_modelopt_holds_every_tensor(family: str, tmp_path: Path) -> None:
    model = float_model(family, tmp_path / "float")
    quantize(family, model, "nvfp4-static:0.0009765625")
    out = export(model, tmp_path / "out", "modelopt")
    check_file(out, load_file(tmp_path / "float" / "model.safetensors"), "modelopt", FAMILIES[family].layers)


@pytest.mark.parametrize("family", ["qwen2", "gpt-neox", "gpt-oss", "gemma3", "qwen2-vl", "vit", "bert", "t5", "bart"])
def test_a_folder_is_exported_as_its_model(family: str, tmp_path: Path) -> None:
    """By the command line, from a checkpoint of aoquant's."""
    model = float_model(family, tmp_path / "float")
    quantize(family, model, "intx4-g32")
    save_pretrained(model, tmp_path / "saved")
    export(model, tmp_path / "a")
    cli.main(["export", str(tmp_path / "saved"), "--format", "compressed-tensors", "--out", str(tmp_path / "b")])
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    assert told(tmp_path / "a") == told(tmp_path / "b")


@pytest.mark.parametrize("family", ["gemma3", "wav2vec2"])
def test_transformers_loads_a_folder_without_the_layers_that_it_initialises(family: str, tmp_path: Path) -> None:
    model = float_model(family, tmp_path / "float")
    quantize(family, model, "intx4-g32")
    skip = {"gemma3": "vision_tower.*", "wav2vec2": "wav2vec2.feature_projection.projection"}[family]  # names in files
    out = export(model, tmp_path / "out", skip=[skip])
    stock, info = type(model).from_pretrained(out, output_loading_info=True)
    assert not any(info.values()), info
    assert torch.equal(outputs(family, stock.eval()), outputs(family, model))


def test_layers_are_named_for_both_readers(tmp_path: Path) -> None:
    """vLLM looks for names in files in the ignore list, transformers for its modules'."""
    model = float_model("llava", tmp_path / "float")
    quantize_(model, PackedWeightConfig("intx4-g32", contract="dequantize"), lambda m, n: "q_proj" in n)
    out = export(model, tmp_path / "out")
    ignored = set(told(out)["ignore"])
    stored = "language_model.model.layers.0.self_attn.k_proj"
    own = "model.language_model.layers.0.self_attn.k_proj"
    assert {stored, own, "multi_modal_projector.linear_1", "model.multi_modal_projector.linear_1"} <= ignored
    assert not any("q_proj" in name for name in ignored)


def test_a_folder_under_the_models_own_names_is_read(tmp_path: Path) -> None:
    model = float_model("llava", tmp_path / "float")
    quantize("llava", model, "intx4-g32")
    out = export(model, tmp_path / "out")
    stored = load_file(out / "model.safetensors")
    moved = {
        ("model." if "lm_head" not in name else "") + name.replace("language_model.model", "language_model"): t
        for name, t in stored.items()
    }
    moved = {name.replace("language_model.lm_head", "lm_head"): t for name, t in moved.items()}
    assert moved.keys().isdisjoint(stored)
    save_file(moved, out / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(outputs("llava", load_pretrained(out, type(model))), outputs("llava", model))


def test_names_of_a_published_checkpoint_are_kept(tmp_path: Path) -> None:
    """Published LLaVA folders have a prefix that transformers drops when it loads them and writes again."""
    model = float_model("llava", tmp_path / "float")
    path = tmp_path / "float" / "model.safetensors"
    floats = {n.replace("vision_tower.", "vision_tower.vision_model."): t for n, t in load_file(path).items()}
    save_file(floats, path, metadata={"format": "pt"})
    model = type(model).from_pretrained(tmp_path / "float", disable_mmap=True).eval()
    quantize("llava", model, "intx4-g32")
    save_pretrained(model, tmp_path / "saved")
    for source, name in ((model, "a"), (tmp_path / "saved", "b")):
        out = export(source, tmp_path / name)
        check_file(out, floats, "compressed-tensors", FAMILIES["llava"].layers)
        assert torch.equal(outputs("llava", load_pretrained(out, type(model))), outputs("llava", model))


@pytest.mark.parametrize("family", ["bert", "clip", "wav2vec2", "whisper", "vit"])
def test_the_class_of_a_checkpoint_is_named(family: str, tmp_path: Path) -> None:
    """Whether transformers has a causal LM for the config or not; of an export too."""
    model = float_model(family, tmp_path / "float")
    kind = type(model).__name__
    if family == "bert":
        kind, model = "BertForSequenceClassification", transformers.BertForSequenceClassification(model.config)
    quantize(family, model, "intx4-g32")
    (export if family == "vit" else save_pretrained)(model, tmp_path / "saved")
    with pytest.raises(ValueError, match=rf"transformers\.{kind}$"):
        load_pretrained(tmp_path / "saved")


def test_layers_that_are_no_nn_linear_are_refused(tmp_path: Path) -> None:
    config = transformers.GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=128, n_positions=64)
    model = transformers.GPT2LMHeadModel(config)
    quantize_(model, PackedWeightConfig("intx4-g32", contract="dequantize"))
    with pytest.raises(ValueError, match=r"attn\.c_attn: .*Conv1D"):
        export(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def changed(name: str, model: Any) -> None:
    """Leave a tensor in a layer, as an adapter does, or take one away."""
    attention = model.model.layers[0].self_attn
    if name == "q_proj.lora_A":
        attention.q_proj.register_parameter("lora_A", nn.Parameter(torch.zeros(2, 64)))
    elif name == "head_scale":
        attention.k_proj.register_buffer("head_scale", torch.ones(2))
    elif name == "v_proj.bias":
        attention.v_proj.bias = None
    else:
        model.model.norm.weight = nn.Parameter(torch.ones(32))


@pytest.mark.parametrize("name", ["q_proj.lora_A", "head_scale", "v_proj.bias", "model.norm.weight"])
def test_tensors_that_no_engine_would_find_are_refused(name: str, tmp_path: Path) -> None:
    model = float_model("qwen2", tmp_path / "float")
    quantize("qwen2", model, "intx4-g32")
    changed(name, model)
    with pytest.raises(ValueError, match=rf"^Qwen2ForCausalLM: .*{name}"):
        export(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_a_head_that_was_untied_is_exported_apart_or_refused(family: str, tmp_path: Path) -> None:
    """T5 ties its head whatever its config says."""
    model = float_model(family, tmp_path / "float")
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone() * 0.5)
    model.config.tie_word_embeddings = False
    quantize(family, model, "intx4-g32")
    if family == "t5":
        with pytest.raises(ValueError, match="tie or untie"):
            export(model, tmp_path / "out")
        return
    stock = type(model).from_pretrained(export(model, tmp_path / "out")).eval()
    assert torch.equal(outputs(family, stock), outputs(family, model))


def test_gguf_holds_biases(tmp_path: Path) -> None:
    model = float_model("qwen2", tmp_path / "float")
    quantize("qwen2", model, "q8_0")
    path = export(model, tmp_path / "out", "gguf", byte_level())
    read = {t.name: torch.tensor(t.data) for t in gguf.GGUFReader(path).tensors}
    attention = model.model.layers[0].self_attn
    for own, layer in (("q", attention.q_proj), ("k", attention.k_proj), ("v", attention.v_proj)):
        assert torch.equal(read[f"blk.0.attn_{own}.bias"], layer.bias.detach().float())
    assert IDS.max() < len(read["token_embd.weight"])


def test_a_config_with_infinity_is_exported(tmp_path: Path) -> None:
    """Mamba 2 limits its time steps to (0, inf), which JSON spells as an object."""
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "vocab_size": 128,
        "state_size": 8,
        "head_dim": 16,
        "num_heads": 8,
    }
    model = transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**sizes, n_groups=1, chunk_size=4)).eval()
    quantize_(model, PackedWeightConfig("intx4-g32", contract="dequantize"))
    export(model, tmp_path / "out")
    ids = torch.arange(8).view(1, 8)
    assert torch.equal(load_pretrained(tmp_path / "out")(ids).logits, model(ids).logits)


def test_parameters_that_are_computed_are_not_missed(tmp_path: Path) -> None:
    """Marian's positions are sines, and no file holds them."""
    config = transformers.MarianConfig(
        vocab_size=128, d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=32, pad_token_id=0, decoder_start_token_id=0,
    )  # fmt: skip
    model = transformers.MarianMTModel(config).eval()
    quantize_(model, PackedWeightConfig("intx4-g32", contract="dequantize"))
    export(model, tmp_path / "out")
    loaded = load_pretrained(tmp_path / "out", transformers.MarianMTModel)
    ids = torch.arange(1, 9).view(1, 8)
    assert torch.equal(
        loaded(input_ids=ids, decoder_input_ids=ids).logits, model(input_ids=ids, decoder_input_ids=ids).logits
    )
