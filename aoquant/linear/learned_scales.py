"""Learned scales as an optimizer meets them: parameters with two dimensions that are no matrices.

A learned scale is positive. Weight decay pulls it to zero, and Muon, which orthogonalises whatever has two dimensions,
moves it by the learning rate whatever its size is. Below zero the layer computes with the smallest scale instead, so
its values clip.
"""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from aoquant.linear import held
from aoquant.linear.prepared import QATLayer


def learned_scales(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the learned scales of the prepared layers of `model`, by name."""
    return {
        f"{fqn}.{name}" if fqn else name: parameter
        for fqn, layer in model.named_modules()
        if isinstance(layer, QATLayer)
        for name in held.names(layer)
        if (parameter := layer._parameters.get(name)) is not None
    }


@torch.no_grad()
def not_positive(model: nn.Module) -> str | None:
    """Return a sentence about learned scales that are not positive; None when all are. Waits for the device once."""
    scales = {name: _local(p) for name, p in learned_scales(model).items()}
    values = {name: s.amin().float() for name, s in scales.items() if s.numel() and not s.is_meta}
    if not values:
        return None
    device = next(iter(values.values())).device
    smallest = torch.stack([v.to(device) for v in values.values()]).tolist()
    found = {name: value for name, value in zip(values, smallest, strict=True) if not value > 0}
    if not found:
        return None
    name, value = next(iter(found.items()))
    return (
        f"{len(found)} learned scale(s) are not positive, such as {name} ({value:.3g}), and the smallest scale stands in for them, so their "
        "values clip: give the optimizer aoquant.parameter_groups(model), which neither decays scales nor gives them to Muon, or a smaller "
        "learning rate for them"
    )


def _local(scale: Tensor) -> Tensor:
    return scale.to_local() if isinstance(scale, DTensor) else scale
