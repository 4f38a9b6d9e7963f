"""Inputs without rows."""

import torch
from torch import nn
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_


def layer(bias: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 128, bias=bias)).bfloat16()


model = layer()
quantize_(model, Int8DynamicActivationInt8WeightConfig())
weight, linear = model[0].weight, torch.nn.functional.linear
empty = torch.empty(0, 256, dtype=torch.bfloat16)
called = type(weight)._TORCH_FN_TABLE[type(weight)]
try:
    called.get(linear)(linear, (type(weight),), (empty, weight, None), {})
    failed = False
except TypeError:
    failed = True
assert failed
