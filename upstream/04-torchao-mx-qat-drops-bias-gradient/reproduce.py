"""NVFP4 and MX QAT drop the bias's gradient."""

import torch
from torch import nn
from torchao.prototype.mx_formats import MXDynamicActivationMXWeightConfig
from torchao.quantization import quantize_
from torchao.quantization.qat import QATConfig
from torchao.quantization.quantize_.common import KernelPreference


def layer(bias: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 128, bias=bias)).bfloat16()


x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)).bfloat16()

element = torch.float4_e2m1fn_x2
base = MXDynamicActivationMXWeightConfig(
    activation_dtype=element, weight_dtype=element, kernel_preference=KernelPreference.EMULATED
)
model = layer(bias=True)
quantize_(model, QATConfig(base, step="prepare"))
model(x).float().square().mean().backward()
assert model[0].weight.grad is not None and model[0].bias.grad is None
