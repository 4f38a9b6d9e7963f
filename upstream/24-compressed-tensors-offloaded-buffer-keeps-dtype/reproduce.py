"""A buffer that a forward casts keeps its dtype."""

import torch
from compressed_tensors.offload import offload_module
from torch import nn


class Cast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Buffer(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.table = self.table.to(x.dtype)
        return self.table


module, given = Cast(), torch.ones(4, dtype=torch.bfloat16)
assert module(given).dtype == torch.bfloat16
module = Cast()
offload_module(module, "cpu", "cpu")
assert module(given).dtype == torch.float32
