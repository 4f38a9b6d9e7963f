"""Silent: int4 in groups of 32 is wrong on MSLK's kernel."""

import torch
from torch import nn
from torchao.quantization import Int4WeightOnlyConfig, quantize_


def layer(bias: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 128, bias=bias)).bfloat16()


def decibels(y: torch.Tensor, want: torch.Tensor) -> float:
    y, want = y.detach().float(), want.detach().float()
    return float(10 * torch.log10(want.square().sum() / (y - want).square().sum()))


x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)).bfloat16()

model = layer().cuda()
want = model(x.cuda())
quantize_(model, Int4WeightOnlyConfig(group_size=32))
assert decibels(model(x.cuda()), want) < 20  # aoquant's int4 in groups of 32 has 24
