"""LoRA adapters on prepared layers and models, for the tests of peft, alone and in parallel."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from aoquant import QATConfig, calibrate, quantize_
from aoquant.calibrate import uncalibrated

from .models import llama


def lora(**options: Any) -> LoraConfig:
    """B is random instead of zero, so that the adapter does something."""
    return LoraConfig(**({"r": 4, "target_modules": "all-linear", "init_lora_weights": False} | options))


def prepared(config: Any, **options: Any) -> LlamaForCausalLM:
    model = llama(**options)
    quantize_(model, QATConfig(config, step="prepare"))
    return model


def layer(config: Any, dtype: torch.dtype = torch.float32, **qat: Any) -> tuple[Any, Tensor, Tensor]:
    """An adapted 64 -> 32 layer, an input and a gradient."""
    model = nn.ModuleDict({"up": nn.Linear(64, 32, dtype=dtype)})
    quantize_(model, QATConfig(config, step="prepare", **qat))
    if uncalibrated(model):  # on half the range, so that these scales are not those of the input
        calibrate(model, lambda m: m["up"](torch.randn(8, 64, dtype=dtype) / 2))
    adapted = get_peft_model(model, lora(target_modules=["up"])).base_model.model["up"]
    return adapted, torch.randn(2, 5, 64, dtype=dtype, requires_grad=True), torch.randn(2, 5, 32, dtype=dtype)
