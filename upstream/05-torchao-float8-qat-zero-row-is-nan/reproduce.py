"""A row of zeros becomes NaN under float8."""

import torch
from torch import nn
from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_
from torchao.quantization.qat import QATConfig


def layer(bias: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 128, bias=bias)).bfloat16()


x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)).bfloat16()

padded = x.clone()
padded[1] = 0
model = layer()
quantize_(model, QATConfig(Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()), step="prepare"))
assert model(padded).isnan().any(1).nonzero().flatten().tolist() == [1]
