"""Int4 QAT trains other numbers than its kernel computes."""

import torch
from torch import nn
from torchao.quantization import Int4WeightOnlyConfig, quantize_
from torchao.quantization.qat import QATConfig


def layer(bias: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 128, bias=bias)).bfloat16()


def decibels(y: torch.Tensor, want: torch.Tensor) -> float:
    y, want = y.detach().float(), want.detach().float()
    return float(10 * torch.log10(want.square().sum() / (y - want).square().sum()))


x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)).bfloat16()

model = layer()
quantize_(model, QATConfig(Int4WeightOnlyConfig(group_size=128), step="prepare"))
w = layer()[0].weight.detach().float().view(128, -1, 128)
low = w.amin(-1, keepdim=True)
scale = (w.amax(-1, keepdim=True) - low) / 15
codes, zero = ((w - low) / scale).round() - 8, low + 8 * scale
trained = (codes * scale + zero).view(128, 256).bfloat16()
deployed = (codes * scale.bfloat16().float() + zero.bfloat16().float()).view(128, 256).bfloat16()
assert torch.equal(trained, model[0].weight_fake_quantizer(model[0].weight))
assert 48 < decibels(x @ trained.t(), x @ deployed.t()) < 51  # 49.3
