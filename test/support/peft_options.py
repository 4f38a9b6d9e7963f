"""Every tuner of peft, and every option of its LoRA: what a prepared layer takes, and what it refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

from peft import LoraConfig
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.lora import config as lora_configs
from peft.tuners.tuners_utils import BaseTuner

TUNERS = {t.value: t for t, tuner in PEFT_TYPE_TO_TUNER_MAPPING.items() if issubclass(tuner, BaseTuner)}
NAMED = r"(model\.[\w.]+|lm_head)"  # of a layer or its parameter


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
