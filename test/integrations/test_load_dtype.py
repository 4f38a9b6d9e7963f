"""A checkpoint that is loaded in another dtype than it was saved in is the loaded model, cast by `.to(dtype)`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoint_configs import OURS, TORCHAO
from support.models import IDS, llama, logits
from support.moe_models import model_of
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from aoquant import PackedTensor, load_pretrained, quantize_, save_pretrained
from aoquant.experts.packed_experts import PackedExperts
from aoquant.linear.packed import PackedLinear
from aoquant.linear.tensor import same_bits

DTYPES = (torch.float32, torch.float16)
LOADERS = {"from_pretrained": AutoModelForCausalLM.from_pretrained, "load_pretrained": load_pretrained}


def tokens(model: Any) -> torch.Tensor:
    found: torch.Tensor = model.generate(IDS, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0)
    return found


def cast(folder: Path, dtype: torch.dtype) -> Any:
    """The checkpoint in its own dtype, then `.to(dtype)`, with rotary frequencies in float32 as a loader makes them."""
    model = load_pretrained(folder)
    frequencies = model.model.rotary_emb.inv_freq
    model.to(dtype)
    model.model.rotary_emb.inv_freq = frequencies
    return model


@pytest.mark.parametrize(
    ("config", "loader", "dtype"),
    [
        pytest.param(config, loader, dtype, marks=[] if i == (j + k) % 2 else [pytest.mark.slow])
        for i, config in enumerate(("nvfp4", "int4-g32"))
        for j, loader in enumerate(LOADERS)
        for k, dtype in enumerate(DTYPES)
    ],
    ids=str,
)
def test_a_packed_model_generates_in_the_dtype_that_it_is_loaded_in(
    config: str, loader: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = llama()
    quantize_(model, OURS[config])
    save_pretrained(model, tmp_path)
    loaded = LOADERS[loader](tmp_path, dtype=dtype)
    assert {p.dtype for p in loaded.parameters()} == {dtype}
    assert type(loaded.model.layers[0].mlp.up_proj) is PackedLinear
    assert logits(loaded).dtype == dtype
    assert torch.equal(logits(loaded), logits(cast(tmp_path, dtype)))
    assert torch.equal(tokens(loaded), tokens(cast(tmp_path, dtype)))


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        pytest.param(config, dtype, marks=[] if i % len(DTYPES) == j else [pytest.mark.slow])
        for i, config in enumerate(OURS | TORCHAO)
        for j, dtype in enumerate(DTYPES)
    ],
    ids=str,
)
def test_every_kind_of_weight_is_what_a_cast_makes_of_it(config: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = llama(num_hidden_layers=1)
    quantize_(model, (OURS | TORCHAO)[config])
    save_pretrained(model, tmp_path)
    wanted = dict(cast(tmp_path, dtype).named_parameters())
    loaded = dict(load_pretrained(tmp_path, dtype=dtype).named_parameters())
    packed = "model.layers.0.mlp.up_proj.weight"
    assert type(loaded[packed]).__name__ != "Parameter"
    assert loaded[packed].dtype == wanted[packed].dtype
    assert same_bits(loaded[packed], wanted[packed])
    assert config in TORCHAO or loaded[packed].dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_packed_head_and_the_embedding_that_it_is_tied_to_stay_one(dtype: torch.dtype, tmp_path: Path) -> None:
    model = llama(tied=True)
    quantize_(model, OURS["int4-g32"], filter_fn=lambda module, fqn: isinstance(module, nn.Linear | nn.Embedding))
    save_pretrained(model, tmp_path)
    loaded = load_pretrained(tmp_path, dtype=dtype)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert type(loaded.lm_head.weight) is PackedTensor
    assert {p.dtype for p in loaded.parameters()} == {dtype}
    assert torch.equal(logits(loaded), logits(cast(tmp_path, dtype)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_experts_are_loaded_in_the_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    model = model_of("qwen3-moe")
    quantize_(model, "mxfp4-experts")
    save_pretrained(model, tmp_path)
    loaded = load_pretrained(tmp_path, dtype=dtype)
    assert type(loaded.model.layers[0].mlp.experts.down_proj) is PackedExperts
    assert {p.dtype for p in loaded.parameters()} == {dtype}
    assert torch.equal(logits(loaded), logits(cast(tmp_path, dtype)))


def test_a_layer_that_its_architecture_keeps_in_float32_stays_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LlamaForCausalLM, "_keep_in_fp32_modules_strict", {"down_proj"})
    float_model = llama()
    float_model.save_pretrained(tmp_path / "float")
    quantize_(float_model, OURS["int8"])
    save_pretrained(float_model, tmp_path / "packed")
    wanted = LlamaForCausalLM.from_pretrained(tmp_path / "float", dtype=torch.float16)
    loaded = load_pretrained(tmp_path / "packed", dtype=torch.float16)
    found = {name: p.dtype for name, p in loaded.named_parameters()}
    assert found == {name: p.dtype for name, p in wanted.named_parameters()}
    assert found["model.layers.0.mlp.down_proj.weight"] == torch.float32
    assert found["model.layers.0.mlp.up_proj.weight"] == torch.float16
