"""The vLLM plugin against a stand-in for the module that it patches; vLLM itself is a nightly matter
(docs/serving.md).
"""

from __future__ import annotations

from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torchao.core.config import config_from_dict, config_to_dict
from torchao.quantization import FqnToConfig, quantize_

from aoquant import GridFlipFP4WeightConfig, IntxWeightConfig, PackedTensor
from aoquant.integrations import vllm_plugin

MAPPING = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}


def stand_in() -> Any:
    """vLLM's loader in small: a placeholder's data, quantised by torchao's own function."""

    def quantise(param: torch.Tensor, config: Any) -> torch.Tensor:
        linear = nn.Linear(param.shape[1], param.shape[0], bias=False)
        linear.weight = nn.Parameter(param, requires_grad=False)
        quantize_(linear, config)
        return linear.weight

    class Config:
        packed_modules_mapping = MAPPING

        def __init__(self, config: Any, skip_modules: list[str] | None = None) -> None:
            self.torchao_config = config_from_dict(config_to_dict(config))  # as it comes from config.json
            self.skip_modules = skip_modules or []

        def get_quant_method(self, layer: Any, prefix: str) -> Any:
            if should_skip(prefix, self.skip_modules):
                return None
            by_name = getattr(self.torchao_config, "module_fqn_to_config", None)  # the older of two fields
            return self.torchao_config if by_name is None else by_name.get(prefix, by_name.get("_default"))

    def should_skip(prefix: str, skip_modules: list[str]) -> bool:
        return any(prefix == s or f".{s}." in f".{prefix}." for s in skip_modules)

    return SimpleNamespace(torchao_quantize_param_data=quantise, TorchAOConfig=Config, should_skip=should_skip)


class Loader:
    """vLLM's DefaultModelLoader in small."""

    def get_all_weights(self, model_config: Any, model: Any) -> list[Any]:
        return []


def test_placeholders_of_uninitialised_memory_load() -> None:
    module = stand_in()
    garbage = torch.full((32, 64), torch.nan, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="NaN or Inf"):
        module.torchao_quantize_param_data(garbage.clone(), GridFlipFP4WeightConfig())
    vllm_plugin.patch(module, Loader)
    vllm_plugin.patch(module, Loader)  # vLLM may call a plugin twice
    weight = module.torchao_quantize_param_data(garbage, GridFlipFP4WeightConfig())
    assert isinstance(weight.data, PackedTensor) or isinstance(weight, PackedTensor)


def test_fused_layers_get_the_recipe_of_their_parts() -> None:
    module = stand_in()
    vllm_plugin.patch(module, Loader)
    one, other = IntxWeightConfig(4, 32), IntxWeightConfig(8, 32)
    names = {f"model.layers.0.self_attn.{n}": one for n in MAPPING["qkv_proj"]}
    config = module.TorchAOConfig(FqnToConfig(dict(names)))
    assert config.get_quant_method(None, "model.layers.0.self_attn.qkv_proj") == one
    assert config.get_quant_method(None, "model.layers.0.self_attn.o_proj") is None
    with pytest.warns(UserWarning, match="_default"):
        rest = FqnToConfig({"model.layers.0.self_attn.o_proj": other, "_default": one})
    assert module.TorchAOConfig(rest).get_quant_method(None, "model.layers.0.self_attn.qkv_proj") == one
    mixed = module.TorchAOConfig(FqnToConfig({**names, "model.layers.0.self_attn.v_proj": other}))
    with pytest.raises(ValueError, match=r"qkv_proj: vLLM computes these layers as one.*q_proj: .*give them one"):
        mixed.get_quant_method(None, "model.layers.0.self_attn.qkv_proj")


def test_fused_layers_of_float_parts_stay_float() -> None:
    module = stand_in()
    vllm_plugin.patch(module, Loader)
    config, attention = IntxWeightConfig(4, 32), "model.layers.1.self_attn."
    floats = [attention + part for part in MAPPING["qkv_proj"]]
    found = module.TorchAOConfig(config, [*floats, "lm_head"])
    assert found.get_quant_method(None, f"{attention}qkv_proj") is None
    assert found.get_quant_method(None, "model.layers.0.self_attn.qkv_proj") == config
    named = module.TorchAOConfig(FqnToConfig({f"{attention}o_proj": config} | dict.fromkeys(floats)))
    assert named.get_quant_method(None, f"{attention}qkv_proj") is None
    some = module.TorchAOConfig(config, floats[:1])
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.qkv_proj: .*q_proj: float, k_proj: .*give them one"):
        some.get_quant_method(None, f"{attention}qkv_proj")


def test_experts_get_a_method_of_ours() -> None:
    """A layer with a moe_config is vLLM's experts; others are never asked about."""
    module, asked = stand_in(), []
    vllm_plugin.patch(module, Loader, lambda config, layer, prefix: asked.append((config, layer, prefix)))
    config, layer = module.TorchAOConfig(IntxWeightConfig(4, 32)), SimpleNamespace(moe_config=None)
    assert config.get_quant_method(layer, "model.layers.0.mlp.experts") is None
    assert asked == [(config, layer, "model.layers.0.mlp.experts")]
    assert config.get_quant_method(None, "model.layers.0.mlp.gate") == IntxWeightConfig(4, 32) and len(asked) == 1


def test_the_entry_point_is_declared() -> None:
    found = [e.value for e in entry_points(group="vllm.general_plugins") if e.name == "aoquant"]
    assert found in ([], ["aoquant.integrations.vllm_plugin:register"])  # empty where the project is not installed anew
    vllm_plugin.register()  # without vLLM it does nothing
