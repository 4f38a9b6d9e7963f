"""Absolute maxima over ranks: tensors of which each rank holds a part, or other tokens, share one scale."""

import torch.distributed as dist
from torch import Tensor


def largest(amax: Tensor) -> Tensor:
    """Return `amax` (any shape, float32), or the largest over all ranks, which all have to call. A NaN may be lost."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return amax
    amax = amax.clone()
    dist.all_reduce(amax, dist.ReduceOp.MAX)
    return amax
