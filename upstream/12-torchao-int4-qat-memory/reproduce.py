"""Int4 QAT keeps 18 bytes a weight for backward."""

import torch
from torch import nn
from torchao.quantization import Int4WeightOnlyConfig, quantize_
from torchao.quantization.qat import QATConfig


def layer(bias: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 128, bias=bias)).bfloat16()


x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)).bfloat16()


def kept(model: nn.Module) -> int:
    hidden, sizes = x.clone().requires_grad_(), {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: sizes.update({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()}) or t, lambda t: t
    ):
        y = model(hidden)
    assert y.requires_grad  # what is kept lives until here
    own = {t.untyped_storage().data_ptr() for t in (hidden, *model.parameters())}
    return sum(size for storage, size in sizes.items() if storage not in own)


model = layer()
assert kept(model) == 0
quantize_(model, QATConfig(Int4WeightOnlyConfig(group_size=128), step="prepare"))
assert kept(model) / model[0].weight.numel() > 18
