"""Static scales are not saved, and not deployed."""

import torch
from torch import nn
from torchao.quantization import IntxWeightOnlyConfig, PerGroup, quantize_
from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig


def layer(bias: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 128, bias=bias)).bfloat16()


def decibels(y: torch.Tensor, want: torch.Tensor) -> float:
    y, want = y.detach().float(), want.detach().float()
    return float(10 * torch.log10(want.square().sum() / (y - want).square().sum()))


x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)).bfloat16()

model = layer()
static = IntxFakeQuantizeConfig(torch.int4, group_size=32, is_dynamic=False)
quantize_(model, QATConfig(weight_config=static, step="prepare"))
model(x)
assert list(model.state_dict()) == ["0.weight"]
with torch.no_grad():
    model[0].weight.mul_(0.5)  # training
trained = model(x)
quantize_(model, QATConfig(IntxWeightOnlyConfig(torch.int4, PerGroup(32)), step="convert"))
assert decibels(model(x), trained) < 17  # 16.0
