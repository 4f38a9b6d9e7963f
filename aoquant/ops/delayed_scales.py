"""Ops of delayed scaling: the absolute maximum of a tensor, and the state after a step."""

from typing import Any

import torch
from torch import Tensor

from aoquant.formats import Operand, delayed
from aoquant.formats.delayed import Delayed
from aoquant.formats.elements import ELEMENTS
from aoquant.formats.scales import absmax as absmax_of

from .define import op


@op(lambda a: a.x.new_empty(1, dtype=torch.float32))
def absmax(x: Tensor) -> Tensor:
    """(1,) float32: the largest magnitude of a tensor; 0 for an empty one."""
    return absmax_of(x.reshape(1, -1) if x.numel() else x.new_zeros(1, 1)).float()


@op(lambda a: Delayed(torch.empty_like(a.amax.new_empty(a.history.shape)), torch.empty_like(a.factor)))
def advance(
    amax: Tensor, history: Tensor, factor: Tensor, x: Operand, w: Operand, grad: Operand, select: str, margin: int
) -> Delayed:
    """The state after a step: of the tensors that are encoded as x, w and grad. amax: (3,), of all ranks. margin: bits
    that factors leave above the largest value.
    """
    formats: list[Any] = [o.format for o in (x, w, grad)]
    largest = torch.stack([torch.full_like(amax[0], ELEMENTS[f.element].largest * 2.0**-margin) for f in formats])
    return delayed.advanced(Delayed(history, factor), amax, largest, select)
