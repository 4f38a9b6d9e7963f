"""Every tuner and every option of peft meets a quantised layer exactly, or is refused by the layer's name.

Exactly: an adapter that is not trained leaves the outputs as they were, merging changes nothing, and the converted
model computes what the merged one does. The tuners and the options are those that the installed peft has.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import config as lora_configs
from support.models import NARROW, llama, logits
from support.peft_options import EXACT, NAMED, REFUSED, TUNERS, config_of, lora
from torch import nn
from transformers import LlamaForCausalLM

from aoquant import Int4WeightConfig, QATConfig, quantize_, quantized_model_init


def model(*, packed: bool = False, **options: Any) -> LlamaForCausalLM:
    """A model whose linear layers, embedding and head are prepared, or packed."""
    torch.manual_seed(0)
    made = llama(**(NARROW | {"num_hidden_layers": 2} | options))
    base = Int4WeightConfig(32)
    quantize_(made, base if packed else QATConfig(base), lambda m, fqn: isinstance(m, nn.Linear | nn.Embedding))
    return made


@pytest.mark.parametrize("name", sorted(set(TUNERS) - {"LORA", "XLORA"}))
def test_a_tuner_that_is_not_lora_is_refused_on_a_prepared_layer(name: str) -> None:
    """XLORA holds LoRA adapters, which are checked one by one."""
    with pytest.raises(ValueError, match=rf"^{NAMED}: {name}"):
        get_peft_model(model(), config_of(name))


@pytest.mark.parametrize("name", ["ADAMSS", "DEFT", "OSF", "SUPERTUNING", "TRAINABLE_TOKENS"])
def test_a_tuner_that_computes_with_packed_codes_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{NAMED}: {name}"):
        get_peft_model(model(packed=True), config_of(name))


@pytest.mark.parametrize("options", EXACT.values(), ids=EXACT)
def test_an_option_is_exact_on_a_prepared_model(options: dict[str, Any]) -> None:
    base = model()
    before = logits(base)
    adapted = get_peft_model(copy.deepcopy(base), lora(**options)).eval()
    assert torch.equal(logits(adapted), before)
    trained = {"init_lora_weights": False} | options
    adapted = get_peft_model(base, lora(**trained)).eval()
    for name, parameter in adapted.named_parameters():  # as training does
        if parameter.requires_grad and "lora_A" not in name:
            parameter.data += torch.randn_like(parameter) / 64
    y = logits(adapted)
    assert not torch.equal(y, before)
    merged = adapted.merge_and_unload()
    assert torch.equal(logits(merged), y)
    quantize_(merged, QATConfig(step="convert"))
    assert torch.equal(logits(merged), y)


@pytest.mark.parametrize("options", EXACT.values(), ids=EXACT)
def test_an_option_meets_float32_masters_exactly_or_is_refused(options: dict[str, Any]) -> None:
    """An adapter adds to the weight, and a layer of `quantized_model_init` has codes alone."""
    torch.manual_seed(0)
    made = llama(**NARROW)
    quantized_model_init(made, QATConfig("fp8-hybrid"))
    before, adapts = logits(made), options.get("target_modules", ["q_proj"])
    if adapts == ["lm_head"] or options.get("target_parameters") == ["embed_tokens.weight"]:
        adapted = get_peft_model(made, lora(**options))
        assert torch.equal(logits(adapted), before)
        ids = torch.arange(8).view(1, 8)
        adapted(ids, labels=ids).loss.backward()
        assert any(p.grad is not None for name, p in adapted.named_parameters() if "lora_B" in name)
        return
    with pytest.raises(ValueError, match=rf"^{NAMED}: "):
        get_peft_model(made, lora(**options))


@pytest.mark.parametrize("packed", [False, True], ids=["prepared", "packed"])
@pytest.mark.parametrize("options", REFUSED.values(), ids=REFUSED)
def test_an_option_is_refused_by_the_layers_name(options: dict[str, Any], packed: bool) -> None:
    with pytest.raises(ValueError, match=rf"^{NAMED}: "):
        get_peft_model(model(packed=packed), lora(**options))


@pytest.mark.parametrize("packed", [False, True], ids=["prepared", "packed"])
def test_tied_rows_are_refused_under_either_name(packed: bool) -> None:
    for tokens in ([1], {"lm_head": [1]}):
        with pytest.raises(ValueError, match=rf"^{NAMED}: trainable_token_indices"):
            get_peft_model(model(packed=packed, tied=True), lora(trainable_token_indices=tokens))


@pytest.mark.parametrize("saved", [["embed_tokens"], ["lm_head"], ["k_proj"], ["mlp"]], ids="".join)
def test_a_copy_of_packed_codes_is_not_trained(saved: list[str]) -> None:
    with pytest.raises(ValueError, match=rf"^{NAMED}: modules_to_save"):
        get_peft_model(model(packed=True), lora(target_modules=["q_proj"], modules_to_save=saved))


def test_a_copy_that_peft_would_tie_as_a_float_layer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^lm_head: ensure_weight_tying"):
        get_peft_model(model(tied=True), lora(modules_to_save=["embed_tokens"], ensure_weight_tying=True))


def test_every_option_of_lora_is_among_these() -> None:
    """A field that a new peft brings fails here first."""
    tried = {name for options in EXACT.values() for name in options}
    tried |= {name for options in REFUSED.values() for name in options}
    elsewhere = {"lora_dropout", "layer_replication", "ensure_weight_tying"}  # test_peft.py, below, above
    # of the config itself, of inits that read data first, and of other quantisers' or parallel layers
    other = {f.name for f in dataclasses.fields(lora_configs.PeftConfig)}
    other |= {"r", "lora_alpha", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size"}
    other |= {"megatron_config", "megatron_core", "runtime_config"}
    assert {f.name for f in dataclasses.fields(LoraConfig)} <= tried | elsewhere | other


def test_replicated_layers_share_a_weight_that_cannot_be_merged_twice() -> None:
    options: dict[str, Any] = {"layer_replication": [[0, 2], [1, 2]]}
    with pytest.raises(ValueError, match=rf"^{NAMED}: LoraConfig\(layer_replication="):
        get_peft_model(model(), lora(**options))
    base = model(packed=True)
    adapted = get_peft_model(base, lora(**options)).eval()
    assert len(adapted.base_model.model.model.layers) == 3
