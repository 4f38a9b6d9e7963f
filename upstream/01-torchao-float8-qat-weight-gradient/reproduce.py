"""Float8 QAT gives the weight almost no gradient."""

import torch
from torch import nn
from torchao.quantization import (
    Float8DynamicActivationFloat8WeightConfig,
    Float8DynamicActivationInt4WeightConfig,
    PerRow,
    quantize_,
)
from torchao.quantization.qat import QATConfig


def layer(bias: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 128, bias=bias)).bfloat16()


x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)).bfloat16()


def gradient(model: nn.Module) -> torch.Tensor:
    model(x).float().square().mean().backward()
    return model[0].weight.grad.float().flatten()


want = gradient(layer())
for base in (
    Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()),
    Float8DynamicActivationInt4WeightConfig(),
):
    model = layer()
    quantize_(model, QATConfig(base, step="prepare"))
    got = gradient(model)
    assert (got == 0).float().mean() > 0.99
    assert torch.cosine_similarity(got, want, dim=0) < 0.1
