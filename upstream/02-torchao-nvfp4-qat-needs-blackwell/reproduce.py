"""NVFP4 QAT needs Blackwell, also for training."""

import torch
from torch import nn
from torchao.prototype.mx_formats import NVFP4DynamicActivationNVFP4WeightConfig
from torchao.quantization import quantize_
from torchao.quantization.qat import QATConfig


def layer(bias: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 128, bias=bias)).bfloat16()


x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)).bfloat16()

base = NVFP4DynamicActivationNVFP4WeightConfig()
model = layer()
quantize_(model, QATConfig(base, step="prepare"))
messages = []
try:
    model(x)
except (ValueError, RuntimeError) as error:
    messages.append("Invalid scaling configuration." in str(error) or "INTERNAL ASSERT FAILED" in str(error))
try:
    quantize_(model, QATConfig(base, step="convert"))
except AssertionError as error:
    messages.append(str(error))
assert messages == [True, "NVFP4 DYNAMIC mode is only supported on sm100+ machines"]
