"""Silent: a bare Linear, and convert with another config."""

import torch
from torch import nn
from torchao.quantization import IntxWeightOnlyConfig, PerGroup, quantize_
from torchao.quantization.qat import QATConfig


def layer(bias: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 128, bias=bias)).bfloat16()


alone = nn.Linear(64, 64)
quantize_(alone, QATConfig(IntxWeightOnlyConfig(torch.int4, PerGroup(32)), step="prepare"))
assert type(alone) is nn.Linear

model = layer()
quantize_(model, QATConfig(IntxWeightOnlyConfig(torch.int4, PerGroup(32)), step="prepare"))
quantize_(model, QATConfig(IntxWeightOnlyConfig(torch.int2, PerGroup(32)), step="convert"))
assert model[0].weight.target_dtype == torch.int2
