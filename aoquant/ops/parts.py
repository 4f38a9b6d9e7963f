"""An encoded matrix as it crosses the boundary of an op: four tensors, codes, scale, zero and outer.

A schema has no tuple of optional tensors as a result, so a missing part is an empty 1-D tensor there; where the bodies of ops are called
without a dispatcher between, it is None.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aoquant.formats import Encoded

Part = Tensor | None


def to_parts(e: Encoded) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Encoded -> four tensors, a missing one as an empty 1-D tensor."""
    return filled(e[:4])


def filled(parts: Sequence[Part]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four parts as ops take and return them: an empty 1-D tensor for None."""
    assert parts[0] is not None
    # an op's outputs must not alias each other, so every missing part is a tensor of its own
    codes, scale, zero, outer = (parts[0].new_empty(0, dtype=torch.uint8) if t is None else t for t in parts)
    return codes, scale, zero, outer


def from_parts(parts: Sequence[Part], k: int) -> Encoded:
    """Inverse of `to_parts`; a missing part may be None too."""
    codes, scale, zero, outer = [None if t is None or t.dim() == 1 else t for t in parts]
    assert codes is not None
    return Encoded(codes, scale, zero, outer, k)
