"""Hugging Face checkpoints of models whose embeddings are quantised: tied stays tied, stored once, and comes back bit
for bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from support.checkpoint_configs import OURS, TORCHAO
from support.models import IDS, everything, llama, logits
from torch import nn
from torchao.quantization import FqnToConfig
from transformers import AutoModelForCausalLM, LlamaForCausalLM, TorchAoConfig

from aoquant import Int4WeightConfig, Int8WeightConfig, QATConfig, load_pretrained, quantize_, save_pretrained
from aoquant.integrations import hf

CONFIGS = {name: (OURS | TORCHAO)[name] for name in ("int4-g32", "int8", "nvfp4", "intx", "int8-weight", "fp8-weight")}


def trained(config: Any, tied: bool = True) -> LlamaForCausalLM:
    model = llama(tied=tied)
    quantize_(model, QATConfig(config, step="prepare"), filter_fn=everything)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    before = logits(model)
    quantize_(model, QATConfig(step="convert"))
    assert torch.equal(logits(model), before)
    return model


def stored(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


@pytest.mark.parametrize(
    "config",
    [pytest.param(c, id=n, marks=[pytest.mark.slow] * (n not in ("int4-g32", "intx"))) for n, c in CONFIGS.items()],
)
def test_a_tied_pair_is_saved_once_and_loaded_tied(config: Any, tmp_path: Path) -> None:
    model = trained(config)
    save_pretrained(model, tmp_path)
    assert not [name for name in stored(tmp_path) if name.startswith("lm_head")]
    assert model.config.quantization_config.include_input_output_embeddings
    loaded = load_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert type(loaded.lm_head.weight) is type(model.lm_head.weight)
    assert torch.equal(logits(loaded), logits(model))
    loaded.tie_weights()
    assert torch.equal(logits(loaded), logits(model))
    loaded.save_pretrained(tmp_path / "again")  # what a Trainer does
    assert stored(tmp_path / "again") == stored(tmp_path)
    assert torch.equal(logits(load_pretrained(tmp_path / "again")), logits(model))


def test_an_untied_pair_is_saved_apart(tmp_path: Path) -> None:
    model = trained(Int4WeightConfig(32), tied=False)
    save_pretrained(model, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is not loaded.model.embed_tokens.weight
    assert torch.equal(logits(loaded), logits(model))


def test_an_embedding_quantised_by_itself(tmp_path: Path) -> None:
    model = llama(tied=False)
    quantize_(model, Int8WeightConfig(), filter_fn=lambda m, fqn: isinstance(m, nn.Embedding))
    assert "lm_head" in hf.attach(model).modules_to_not_convert
    save_pretrained(model, tmp_path)
    loaded = load_pretrained(tmp_path)
    assert type(loaded.lm_head.weight) is nn.Parameter
    assert torch.equal(logits(loaded), logits(model))


def test_one_of_a_pair_that_the_config_ties_is_refused(tmp_path: Path) -> None:
    for layer, name in (("lm_head", "output head"), ("model.embed_tokens", "input embedding")):
        model = llama(tied=True)
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        quantize_(model, Int8WeightConfig(), filter_fn=lambda m, fqn, layer=layer: fqn == layer)
        with pytest.raises(ValueError, match=f"the {name} is quantised by itself.*tie_word_embeddings = False"):
            save_pretrained(model, tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_config_alone_quantises_the_same_layers_of_the_float_model(tmp_path: Path) -> None:
    model = llama(tied=True)
    model.save_pretrained(tmp_path)
    quantize_(model, Int4WeightConfig(32), filter_fn=everything)
    config = hf.attach(model)
    assert isinstance(config.quant_type, FqnToConfig)
    again = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=TorchAoConfig.from_dict(config.to_dict())
    )
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("name", ["int8-weight", "intx"])
@pytest.mark.parametrize("how", ["quantised", "prepared", "prepared by name"])
def test_transformers_takes_embeddings_along_as_it_loads(name: str, how: str, tmp_path: Path) -> None:
    model = llama(tied=False)
    model.save_pretrained(tmp_path)
    config = CONFIGS[name] if how == "quantised" else QATConfig(CONFIGS[name], step="prepare")
    asked = FqnToConfig({"_default": config}) if how == "prepared by name" else config
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=TorchAoConfig(asked, include_input_output_embeddings=True)
    )
    quantize_(model, config, everything)
    for end in ("model.embed_tokens", "lm_head"):
        found, wanted = loaded.get_submodule(end), model.get_submodule(end)
        assert type(found) is type(wanted) and type(found.weight) is type(wanted.weight)
    assert torch.equal(logits(loaded), logits(model))
