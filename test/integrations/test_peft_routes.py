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
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.lora import config as lora_configs
from peft.tuners.tuners_utils import BaseTuner
from support.models import NARROW, llama, logits
from torch import nn
from transformers import LlamaForCausalLM

from aoquant import Int4WeightConfig, QATConfig, quantize_, quantized_model_init

TUNERS = {t.value: t for t, tuner in PEFT_TYPE_TO_TUNER_MAPPING.items() if issubclass(tuner, BaseTuner)}
NAMED = r"(model\.[\w.]+|lm_head)"  # of a layer or its parameter


def model(*, packed: bool = False, **options: Any) -> LlamaForCausalLM:
    """A model whose linear layers, embedding and head are prepared, or packed."""
    torch.manual_seed(0)
    made = llama(**(NARROW | {"num_hidden_layers": 2} | options))
    base = Int4WeightConfig(32)
    quantize_(made, base if packed else QATConfig(base), lambda m, fqn: isinstance(m, nn.Linear | nn.Embedding))
    return made


def config_of(name: str) -> Any:
    """A tuner's config for the same two kinds of layers, or for the embedding."""
    cls = PEFT_TYPE_TO_CONFIG_MAPPING[TUNERS[name]]
    fields = {f.name for f in dataclasses.fields(cls)}
    needed: dict[str, Any] = {
        "target_modules": ["q_proj", "up_proj"],
        "feedforward_modules": ["up_proj"],
        "vector_length": 32,
        "total_step": 10,
    }
    options = {key: value for key, value in needed.items() if key in fields}
    if name == "TRAINABLE_TOKENS":
        options = {"target_modules": ["embed_tokens"], "token_indices": [1, 2]}
    if name == "XLORA":
        options = {"hidden_size": 64, "adapters": {}}
    return cls(task_type="CAUSAL_LM", **options)


@pytest.mark.parametrize("name", sorted(set(TUNERS) - {"LORA", "XLORA"}))
def test_a_tuner_that_is_not_lora_is_refused_on_a_prepared_layer(name: str) -> None:
    """XLORA holds LoRA adapters, which are checked one by one."""
    with pytest.raises(ValueError, match=rf"^{NAMED}: {name}"):
        get_peft_model(model(), config_of(name))


@pytest.mark.parametrize("name", ["ADAMSS", "DEFT", "OSF", "SUPERTUNING", "TRAINABLE_TOKENS"])
def test_a_tuner_that_computes_with_packed_codes_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{NAMED}: {name}"):
        get_peft_model(model(packed=True), config_of(name))


EXACT: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias all": {"bias": "all"},
    "bias lora_only": {"bias": "lora_only"},
    "rslora": {"use_rslora": True},
    "patterns": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 2}},
    "excluded": {"exclude_modules": ["q_proj"]},
    "layers": {"layers_to_transform": [0], "layers_pattern": "layers"},
    "gaussian": {"init_lora_weights": "gaussian"},
    "a parameter": {"target_modules": [], "target_parameters": ["q_proj.weight"]},
    "the embedding's parameter": {"target_modules": [], "target_parameters": ["embed_tokens.weight"]},
    "head": {"target_modules": ["lm_head"]},
    "saved embedding": {"modules_to_save": ["embed_tokens"]},
    "saved head": {"modules_to_save": ["lm_head"]},
    "saved layer": {"modules_to_save": ["k_proj"]},
    "saved block": {"target_modules": ["q_proj"], "modules_to_save": ["mlp"]},
}
REFUSED: dict[str, dict[str, Any]] = {
    "tokens": {"trainable_token_indices": [1, 2]},
    "tokens by name": {"trainable_token_indices": {"embed_tokens": [1]}},
    "tokens of the head": {"trainable_token_indices": {"lm_head": [1]}},
    "rows of a layer": {"trainable_token_indices": {"down_proj": [1]}},
    "an embedding": {"target_modules": ["embed_tokens"]},
    "a bias": {"target_modules": [], "target_parameters": ["q_proj.bias"]},
    "dora": {"use_dora": True},
    "alora": {"alora_invocation_tokens": [1]},
    "lora_bias": {"lora_bias": True},
    "transposed": {"fan_in_fan_out": True},
    "qalora": {"use_qalora": True},
    "loftq": {"init_lora_weights": "loftq", "loftq_config": lora_configs.LoftQConfig()},
    "mica": {"init_lora_weights": "mica"},
    "velora": {"velora_config": lora_configs.VeloraConfig()},
    "arrow": {"arrow_config": lora_configs.ArrowConfig()},
    "kasa": {"kasa_config": lora_configs.KasaConfig()},
    "bdlora": {"use_bdlora": lora_configs.BdLoraConfig()},
    "monteclora": {"monteclora_config": lora_configs.MontecloraConfig()},
}


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(**({"task_type": "CAUSAL_LM", "r": 4, "target_modules": ["q_proj", "up_proj"]} | options))


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
