"""A weight that gets a gradient although its layer's forward never ran: noticed in the first backward after prepare.

`direct_reads.py` watches the first forward of a model. A model whose other methods are called instead, as in
`model.generate_loss(x)`, is not seen by it. So prepare also puts a hook on the weight of each linear layer, which takes
itself away at the weight's first gradient. Every eager training forward of a layer goes through one function. That
function tells this module that the layer ran, and the watch of its weight ends.

Afterwards this costs a look at an empty dictionary, and nothing in compiled code, which does not run that function.
When a compiler traces it, the watch of all weights ends, because the forwards of compiled layers are not seen.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

ADVICE = (
    "that bypasses fake quantisation, and the converted model will compute something else: call the layer instead of reading its weight, or "
    "leave it out of prepare (filter_fn, or None for its name in FqnToConfig)"
)
waiting: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # weight of a layer that has not run: the hook on it


def watch(layer: Any) -> None:
    """Warn when the weight of a prepared layer gets a gradient before the layer's forward runs."""
    weight = layer.weight
    if not isinstance(weight, nn.Parameter) or not (weight.requires_grad and weight.is_leaf) or weight in waiting:
        return
    if isinstance(weight, DTensor):
        return
    found: weakref.ref[Any] = weakref.ref(layer)

    def got_gradient(weight: Tensor) -> None:
        handle: RemovableHandle | None = waiting.pop(weight, None)
        if handle is None:
            return
        handle.remove()
        layer = found()
        if layer is not None and getattr(layer, "fake_quant", False) and layer._parameters.get("weight") is weight:
            warnings.warn(
                f"the weight of {layer.prepared.fqn or 'the layer'} got a gradient although the layer's forward has not run: it is read "
                f"directly; {ADVICE}",
                stacklevel=2,
            )

    waiting[weight] = weight.register_post_accumulate_grad_hook(got_gradient)


def ran(weight: Tensor | None) -> None:
    """The layer that has this weight ran, or is traced by a compiler."""
    if isinstance(weight, FakeTensor) or torch.compiler.is_compiling():
        for other in list(waiting.keys()):
            _forget(other)
    elif weight is not None:
        _forget(weight)


def forget(model: nn.Module) -> None:
    """End the watch of all weights of `model`."""
    if waiting:
        for parameter in model.parameters():
            _forget(parameter)


def _forget(weight: Tensor) -> None:
    if (handle := waiting.pop(weight, None)) is not None:
        handle.remove()
