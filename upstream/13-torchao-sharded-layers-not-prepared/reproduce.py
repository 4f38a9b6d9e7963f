"""Layers that are sharded first cannot be prepared."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torchao.quantization import IntxWeightOnlyConfig, PerGroup, quantize_
from torchao.quantization.qat import QATConfig


def layer(bias: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 128, bias=bias)).bfloat16()


x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)).bfloat16()

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = dist.init_device_mesh("cpu", (1,))
prepare = QATConfig(IntxWeightOnlyConfig(torch.int4, PerGroup(32)), step="prepare")
messages = []
for shard in (
    lambda model: fully_shard(model[0], mesh=mesh),
    lambda model: parallelize_module(model, mesh, {"0": ColwiseParallel()}),
):
    model = layer()
    shard(model)
    quantize_(model, prepare)
    try:
        model(x)
    except RuntimeError as error:
        messages.append(str(error))
assert len(messages) == 2 and all("mixed torch.Tensor and DTensor" in message for message in messages)

model = layer()
quantize_(model, prepare)
try:
    parallelize_module(model, mesh, {"0": RowwiseParallel()})
except AttributeError as error:
    messages.append(str(error))
assert messages[2] == "'IntxFakeQuantizer' object has no attribute 'weight'"
dist.destroy_process_group()
