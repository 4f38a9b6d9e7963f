"""Compiled intx QAT trains other numbers than convert deploys."""

import torch
from torch import nn
from torchao.quantization import Int8DynamicActivationIntxWeightConfig, IntxWeightOnlyConfig, PerGroup, quantize_
from torchao.quantization.qat import QATConfig


def layer(bias: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 128, bias=bias)).bfloat16()


def decibels(y: torch.Tensor, want: torch.Tensor) -> float:
    y, want = y.detach().float(), want.detach().float()
    return float(10 * torch.log10(want.square().sum() / (y - want).square().sum()))


x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)).bfloat16()

for base in (
    IntxWeightOnlyConfig(torch.int4, PerGroup(32)),
    Int8DynamicActivationIntxWeightConfig(torch.int4, PerGroup(32)),
):
    model = layer()
    quantize_(model, QATConfig(base, step="prepare"))
    with torch.no_grad():
        eager, compiled = model(x).float(), torch.compile(model)(x).float()
        quantize_(model, QATConfig(base, step="convert"))
        deployed = model(x).float()
    assert torch.equal(eager, deployed)
    assert decibels(compiled, deployed) < 35  # 31.9 and 31.5 dB
