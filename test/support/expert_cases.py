"""Stacked experts of families of transformers, configs for them, and tokens with their experts."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.aria.configuration_aria import AriaTextConfig
from transformers.models.aria.modeling_aria import AriaExperts
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts
from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextExperts
from transformers.models.glm4_moe.configuration_glm4_moe import Glm4MoeConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeExperts
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.configuration_mixtral import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import aoquant
from aoquant import (
    Hadamard,
    Int4WeightConfig,
    Int8WeightConfig,
    IntxWeightConfig,
    MXFP4WeightConfig,
    NVFP4WeightConfig,
    get_format,
)
from aoquant.experts.families import is_transposed, stacks_of
from aoquant.ops import grouped

H, WIDTH, E = 64, 96, 4
SIZES = {"hidden_size": H, "moe_intermediate_size": WIDTH, "num_experts_per_tok": 2}
FAMILIES: dict[str, tuple[Any, Any]] = {
    "mixtral": (MixtralExperts, MixtralConfig(hidden_size=H, intermediate_size=WIDTH, num_local_experts=E)),
    "qwen3-moe": (Qwen3MoeExperts, Qwen3MoeConfig(**SIZES, num_experts=E)),
    "deepseek-v3": (DeepseekV3Experts, DeepseekV3Config(**SIZES, n_routed_experts=E)),
    "gpt-oss": (GptOssExperts, GptOssConfig(hidden_size=H, intermediate_size=WIDTH, num_local_experts=E)),
    "gemma-4": (Gemma4TextExperts, Gemma4TextConfig(hidden_size=H, moe_intermediate_size=WIDTH, num_experts=E)),
    "glm4-moe": (Glm4MoeExperts, Glm4MoeConfig(**SIZES, n_routed_experts=E)),
}
if hasattr(AriaExperts, "_apply_gate"):  # from transformers 5.24 on: before, a forward of its own
    FAMILIES["aria"] = (AriaExperts, AriaTextConfig(hidden_size=H, intermediate_size=WIDTH, moe_num_experts=E))
try:  # from transformers 5.24 on; its experts end in a norm
    spark: Any = importlib.import_module("transformers.models.muse_spark")
except ImportError:
    pass
else:
    sizes = {"moe_hidden_size": H, "moe_intermediate_size": WIDTH, "num_local_experts": E}
    FAMILIES["muse-spark"] = (
        spark.modeling_muse_spark.MuseSparkExperts,
        spark.configuration_muse_spark.MuseSparkTextConfig(**sizes),
    )
CONFIGS = {
    "int4": Int4WeightConfig(32),
    "nvfp4": NVFP4WeightConfig(),
    "mxfp4": MXFP4WeightConfig(),
    "hadamard": MXFP4WeightConfig(transform=Hadamard(32)),
    "int8": Int8WeightConfig(activation="int8-row"),
    "int8-tensor": aoquant.PackedWeightConfig("int8-row", "int8-tensor"),
    "intx": IntxWeightConfig(3, 32),
}
IMPLEMENTATIONS = ("eager", "grouped_mm")


class Holder(nn.Module):
    """A module around experts, so that they have a name."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, *args: Any) -> Any:
        return self.experts(*args)


def made(family: str, implementation: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    cls, config = FAMILIES[family]
    config = copy.deepcopy(config)
    config._experts_implementation = implementation
    torch.manual_seed(0)
    experts = cls(config).to(dtype)
    for p in experts.parameters():
        p.data.normal_(0, 0.2)
    return Holder(experts)


def fake_quantised(model: nn.Module, name: str) -> Any:
    """The model with its experts' weights replaced by their quantised values."""
    other, operand = copy.deepcopy(model), get_format(name)
    for module in other.modules():
        for parameter in stacks_of(module):
            for w in getattr(module, parameter).data:
                w.copy_(operand.fake_quantize(w.t()).t() if is_transposed(module) else operand.fake_quantize(w))
    return other


def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply all experts at once, as on a GPU: the device is not asked."""
    monkeypatch.setattr(grouped, "why_not", lambda *args: None)


def routed(tokens: int, how: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, their experts and weights. Expert 3 has no tokens."""
    torch.manual_seed(1)
    x, weights = torch.randn(tokens, H).to(dtype), torch.rand(tokens, 2).to(dtype)
    if how == "one expert":
        return x, torch.ones(tokens, 1, dtype=torch.int64), weights[:, :1]
    if how == "ties":  # what top-k of equal scores gives: the same two for every token
        return x, torch.topk(torch.zeros(tokens, 3), 2).indices, weights
    return x, torch.stack([torch.randperm(3)[:2] for _ in range(tokens)]), weights
