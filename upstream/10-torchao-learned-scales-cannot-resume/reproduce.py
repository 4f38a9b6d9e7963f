"""Learned scales cannot resume."""

import torch
from torch import nn
from torchao.quantization import quantize_
from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig, initialize_fake_quantizers


def layer(bias: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 128, bias=bias)).bfloat16()


x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)).bfloat16()

learned = IntxFakeQuantizeConfig(torch.int4, group_size=32, is_dynamic=False, range_learning=True)
trained, resumed = layer(), layer()
for model in (trained, resumed):
    quantize_(model, QATConfig(weight_config=learned, step="prepare"))
initialize_fake_quantizers(trained, (x,))
try:
    resumed.load_state_dict(trained.state_dict())
    message = ""
except RuntimeError as error:
    message = str(error)
assert "Unexpected key(s)" in message and "weight_fake_quantizer.scale" in message
