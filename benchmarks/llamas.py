"""Llamas and a Gemma with random weights, and the ways in which benchmarks/model.py quantises them.

A variant is a name: "bf16", a recipe of aoquant ("int4-g128"), or "torchao:" and one of torchao's own configs, applied
by torchao's own `quantize_`. The output head stays in bf16 in all of them, as aoquant leaves it by default. Weights
come from a seed on the device, so that a fresh copy of a model costs no transfer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torchao.prototype.mx_formats import NVFP4DynamicActivationNVFP4WeightConfig
from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, Int4WeightOnlyConfig, PerRow
from torchao.quantization import quantize_ as torchao_quantize_
from torchao.quantization.qat import QATConfig as TorchaoQATConfig
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from aoquant import quantize_
from aoquant.recipes import get_recipe

BF16 = torch.bfloat16
BASE = "bf16"
TORCHAO = "torchao:"


@dataclass(frozen=True)
class Size:
    """A model's shape. layers: decoder layers. vocabulary: rows of embedding and head, which are one where tied.
    gemma: a Gemma 3, with heads of 256 values and, but for every sixth layer, attention to 512 tokens.
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    layers: int
    vocabulary: int
    tied: bool = False
    gemma: bool = False


# the model of docs/evidence/experiments.md, 21.9 M parameters
SMALL = Size(512, 1408, 8, 4, 6, 8192, tied=True)
GEMMA_270M = Size(640, 2048, 4, 1, 18, 262_144, tied=True, gemma=True)


def llama(hidden: int, layers: int, vocabulary: int) -> Size:
    """The shape of a Llama 3 of that width: 1B's at 2048, 8B's at 4096; others keep 8B's proportions."""
    intermediate = {2048: 8192}.get(hidden, hidden * 7 // 2)
    head = 64 if hidden <= 2048 else 128
    heads = max(hidden // head, 4)
    return Size(hidden, intermediate, heads, max(heads // 4, 1), layers, vocabulary)


def build(size: Size, device: torch.device) -> PreTrainedModel:
    """The model in bf16 on `device`, always with the same weights. It never ends a text by itself."""
    make = partial(Gemma3TextConfig, head_dim=256, sliding_window=512) if size.gemma else LlamaConfig
    config = make(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=8192,
        tie_word_embeddings=size.tied,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(BF16)
    try:
        with torch.device(device):
            return Gemma3ForCausalLM(config) if size.gemma else LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)


def _tinygemm() -> Any:
    return Int4WeightOnlyConfig(group_size=128, int4_packing_format="tile_packed_to_4d")


def _mx(element: torch.dtype) -> Any:
    from layers import emulated  # Hopper has no MX GEMM

    return emulated(element)


# "torchao:NAME" -> its config
CONFIGS: dict[str, Callable[[], Any]] = {
    "int4": lambda: Int4WeightOnlyConfig(group_size=128),  # deployed by MSLK's kernel, where mslk is installed
    "int4-tinygemm": _tinygemm,
    "int4-cpu": lambda: get_recipe("torchao-int4-cpu").make(),
    "int8-int4": lambda: get_recipe("torchao-int8-int4").make(),
    "int8": lambda: get_recipe("torchao-int8").make(),
    "fp8": lambda: Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()),
    "mxfp4": lambda: _mx(torch.float4_e2m1fn_x2),
    "mxfp8": lambda: _mx(torch.float8_e4m3fn),
    "nvfp4": NVFP4DynamicActivationNVFP4WeightConfig,
}


def _but_the_head(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and name != "lm_head"


def _torchao_config(variant: str) -> Any:
    """Raises ValueError when torchao's configs here have no such name."""
    name = variant.removeprefix(TORCHAO)
    if name not in CONFIGS:
        raise ValueError(f"{variant!r} is no variant; torchao's are {', '.join(TORCHAO + n for n in CONFIGS)}")
    return CONFIGS[name]()


def check(variant: str) -> None:
    """Raise ValueError unless `variant` is a name of one."""
    if variant.startswith(TORCHAO):
        _torchao_config(variant)
    elif variant != BASE:
        get_recipe(variant)


def prepare(model: nn.Module, variant: str) -> None:
    """Fake quantisation for training, in place."""
    if variant.startswith(TORCHAO):
        torchao_quantize_(model, TorchaoQATConfig(_torchao_config(variant), step="prepare"), filter_fn=_but_the_head)
    elif variant != BASE:
        quantize_(model, get_recipe(variant).prepare())


def deploy(model: nn.Module, variant: str) -> None:
    """Quantised weights for inference, in place."""
    if variant.startswith(TORCHAO):
        torchao_quantize_(model, _torchao_config(variant), filter_fn=_but_the_head)
    elif variant != BASE:
        quantize_(model, get_recipe(variant).make())
