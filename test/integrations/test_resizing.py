"""`resize_token_embeddings`: prepared embeddings are resized, packed ones are refused before anything is changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import NARROW, llama
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig
from transformers import T5Config, T5ForConditionalGeneration

from aoquant import QATConfig, load_pretrained, quantize_, save_pretrained

CHOICES: dict[str, Callable[[nn.Module, str], bool]] = {
    "both": lambda m, name: isinstance(m, nn.Linear | nn.Embedding),
    "head": lambda m, name: name == "lm_head",
    "embedding": lambda m, name: name == "model.embed_tokens",
}
CASES = [("both", True), *((choice, False) for choice in CHOICES)]
BASES: dict[str, Any] = {"aoquant": "int4-g32", "torchao": Int8WeightOnlyConfig()}


def made(choice: str, tied: bool, base: str, step: str) -> Any:
    model = llama(tied, attention_bias=False, **NARROW)
    quantize_(model, QATConfig(BASES[base]), CHOICES[choice])
    if step == "convert":
        quantize_(model, QATConfig(step="convert"))
    return model


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize(("choice", "tied"), CASES)
def test_packed_ones_are_refused_by_name(choice: str, tied: bool, base: str) -> None:
    model = made(choice, tied, base, "convert")
    layer = "lm_head" if choice == "head" else "model.embed_tokens"
    before = {name: id(p) for name, p in model.named_parameters()}
    for given in ({"new_num_tokens": 160}, {"new_num_tokens": 20}, {"pad_to_multiple_of": 48}):
        with pytest.raises(ValueError, match=rf"^{layer}: .* the weight is packed: resize .* float model first, then"):
            model.resize_token_embeddings(**given)
        assert {name: id(p) for name, p in model.named_parameters()} == before and model.config.vocab_size == 128
    for given in ({}, {"new_num_tokens": 128}, {"pad_to_multiple_of": 64}):
        assert model.resize_token_embeddings(**given) is model.get_input_embeddings()


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize(("choice", "tied"), CASES)
def test_prepared_ones_are_resized(choice: str, tied: bool, base: str) -> None:
    model = made(choice, tied, base, "prepare")
    for tokens in (160, 20):
        model.resize_token_embeddings(tokens)
        assert model(torch.tensor([[tokens - 1]])).logits.shape == (1, 1, tokens)


@pytest.mark.parametrize("tied", [True, False])
def test_a_folder_with_another_vocabulary_in_its_config_says_resize(tied: bool, tmp_path: Path) -> None:
    save_pretrained(made("both", tied, "aoquant", "convert"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": config["vocab_size"] + 32}))
    with pytest.raises(
        ValueError, match=r"model\.embed_tokens\.weight is .*vocab_size of config.json: .*resize_token_embeddings"
    ):
        load_pretrained(tmp_path, verify_checksums=False)


def test_the_order_that_the_error_asks_for() -> None:
    model: Any = llama(False, attention_bias=False, **NARROW)
    model.resize_token_embeddings(160)
    quantize_(model, QATConfig("int4-g32"), CHOICES["both"])
    quantize_(model, QATConfig(step="convert"))
    assert model.lm_head.weight.shape == model.model.embed_tokens.weight.shape == (160, 64)


def test_a_shared_embedding_of_encoder_and_decoder() -> None:
    model = T5ForConditionalGeneration(
        T5Config(vocab_size=128, d_model=64, d_kv=16, d_ff=64, num_layers=1, num_heads=4, decoder_start_token_id=0)
    ).bfloat16()
    quantize_(model, QATConfig("int4-g32"), lambda m, name: CHOICES["both"](m, name) and "bias" not in name)
    quantize_(model, QATConfig(step="convert"))
    with pytest.raises(ValueError, match=r"^shared: resize_token_embeddings would resize its weight from 128 to 160"):
        model.resize_token_embeddings(160)
