"""Intx QAT freezes the largest weight of a group."""

import torch
from torch import nn
from torchao.quantization import IntxWeightOnlyConfig, PerGroup, quantize_
from torchao.quantization.qat import QATConfig


def layer(bias: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 128, bias=bias)).bfloat16()


x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)).bfloat16()

model = layer()
quantize_(model, QATConfig(IntxWeightOnlyConfig(torch.int4, PerGroup(32)), step="prepare"))
model(x).float().square().mean().backward()
w_GB, stopped_GB = model[0].weight.detach().view(-1, 32), (model[0].weight.grad == 0).view(-1, 32)
largest, every = (0.94, 0.094) if torch.__version__ >= "2.14" else (0.40, 0.013)
assert abs(stopped_GB[torch.arange(len(w_GB)), w_GB.argmax(1)].float().mean() - largest) < 0.01
assert abs(stopped_GB.float().mean() - every) < 0.001
