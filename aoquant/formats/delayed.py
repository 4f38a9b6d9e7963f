"""Delayed scaling: the factor of a step follows from the absolute maxima of earlier steps, so that none has to be found
before values are rounded.

    history[0] = amax of this step
    amax       = the largest of the history ("max"), or history[0] ("most_recent")
    factor     = (MAX / 2^margin) / amax; the old factor where amax is 0, Inf or NaN, and at most the largest float32
    history    = rolled by one, history[0] = 0

A row of the history and a factor belong to one tensor: the input, the weight or the gradient of a layer. The first
step's factor is 1. What is larger than its history allows saturates, and gradients that are below e5m2's range under a
factor of 1 are zero: then the layer below has an amax of 0, and waits for the next step (docs/hybrid.md).
Source: NVIDIA/TransformerEngine `DelayedScaling`, `_update_amax_history`, `_compute_scaling_factor_default`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .elements import FLOAT32_MAX

SELECTS = ("max", "most_recent")


class Delayed(NamedTuple):
    """What a layer remembers of its tensors, float32.

    history: (tensors, steps) absolute maxima, the newest last. factor: (tensors,), of the next step.
    """

    history: Tensor
    factor: Tensor


def fresh(tensors: int, steps: int, device: torch.device | str = "cpu") -> Delayed:
    """Before the first step."""
    history = torch.zeros(tensors, steps, dtype=torch.float32, device=device)
    return Delayed(history, torch.ones(tensors, dtype=torch.float32, device=device))


def resized(d: Delayed, steps: int) -> Delayed:
    """The same with a history of another length: the newest steps of it, and the factor. The oldest place is free."""
    kept = min(d.history.shape[1], steps) - 1
    history = d.history.new_zeros(d.history.shape[0], steps)
    history[:, steps - kept :] = d.history[:, d.history.shape[1] - kept :]
    return Delayed(history, d.factor)


def advanced(d: Delayed, amax: Tensor, largest: Tensor, select: str) -> Delayed:
    """After a step whose absolute maxima were `amax` (tensors,). largest: (tensors,), of their elements."""
    history = torch.cat((amax.unsqueeze(1), d.history[:, 1:]), 1)
    found = history.amax(1) if select == "max" else history[:, 0]
    factor = torch.where((found > 0) & found.isfinite(), largest / found, d.factor).clamp(max=FLOAT32_MAX)
    if history.shape[1] > 1:
        history = history.roll(-1, 1)
    history[:, 0] = 0
    return Delayed(history, factor)
