"""Absolute maxima over ranks: tensors of which each rank holds a part, or other tokens, share one scale."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor


def largest(amax: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """`amax` (any shape, float32), or the largest over the ranks of `group` where there are several; the default group
    for None. Every rank of it has to call. A NaN may be lost on the way.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
        return amax
    amax = amax.clone()
    dist.all_reduce(amax, dist.ReduceOp.MAX, group)
    return amax
