"""transformers' Conv1D, the linear layer of GPT-2 and its kin: y = x W + b with W (K, N).

Prepared, it keeps its parameters and keys, and computes what nn.Linear over W^T computes. Converted, it is a Conv1D
whose weight is a quantised tensor (N, K), as kernels and loaders have it. Importing this module teaches the class to
multiply by that, because a checkpoint's loader builds the class and no code of ours runs in between.
"""

import functools
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torchao.utils import TorchAOBaseTensor
from transformers.pytorch_utils import Conv1D

from aoquant.linear.kinds import KINDS, Kind
from aoquant.linear.prepared import QATLinear


class QATConv1D(QATLinear, Conv1D):
    """Conv1D whose forward computes what the converted layer will compute. weight: (K, N), as before."""

    plain = Conv1D
    nx: int
    nf: int
    __repr__ = QATLinear.__repr__

    @property
    def in_features(self) -> int:  # type: ignore[override]
        """K, which Conv1D calls nx."""
        return self.nx

    @property
    def out_features(self) -> int:  # type: ignore[override]
        """N, which Conv1D calls nf."""
        return self.nf

    def forward(self, x: Tensor) -> Tensor:  # the name that Conv1D gives its input
        return super().forward(x)

    def matrix(self) -> Tensor:
        """Return the weight as (N, K), copied: encoders read rows. Autograd keeps the copy from forward to backward."""
        if isinstance(self.weight, DTensor):
            raise ValueError(
                "Conv1D under tensor parallelism is not supported: leave it out of the plan, or out of prepare"
            )
        return self.weight.t().contiguous()


def teach() -> None:
    """Let Conv1D multiply by quantised weights, and let aoquant prepare it."""
    KINDS.append(Kind(Conv1D, QATConv1D, transposed=True))
    before = Conv1D.forward

    @functools.wraps(before)
    def forward(self: Any, x: Tensor) -> Tensor:
        if isinstance(self.weight, TorchAOBaseTensor):
            return F.linear(x, self.weight, self.bias)
        return before(self, x)

    Conv1D.forward = forward


teach()
