"""Shared operands: packed layers that read one input, such as q, k and v or gate and up, encode many rows of it once.

Without gradients autograd keeps nothing, so what one layer made of its input is held here until the input is gone or
another one is encoded in the same thread. The same input means the same tensor object at the same version, on the same
stream. A write that moves no version counter (a kernel of one's own into a buffer that is used again) is covered by the
rule of shared_inputs.py: a layer never takes an encoding that it took or made before.

Nothing is shared under inference mode, whose tensors have no version, and nothing is taken while a CUDA graph is
captured.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class _Latest(threading.local):
    """What the thread encoded last. layers: the identities of those that have it."""

    x: weakref.ref[Tensor] | None = None
    key: tuple[Any, ...] = ()
    made: Any = None
    layers: set[int]


_latest = _Latest()


def shared(x: Tensor, how: tuple[Any, ...], layer: int, encode: Callable[[], T]) -> T:
    """encode(), or what another layer made of x in the same way. how: the operand and dtype. layer: an identity."""
    if x.is_inference():
        return encode()
    stream = torch._C._cuda_getCurrentRawStream(x.get_device()) if x.is_cuda else 0
    key = (*how, x._version, stream)
    found = _latest.x
    same = found is not None and found() is x and _latest.key == key and layer not in _latest.layers
    if same and not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        _latest.layers.add(layer)
        made: T = _latest.made
        return made
    fresh = encode()
    local = vars(_latest)

    def forget(of: weakref.ref[Tensor]) -> None:
        if local.get("x") is of:
            local.update(x=None, made=None)

    _latest.x, _latest.key, _latest.made, _latest.layers = weakref.ref(x, forget), key, fresh, {layer}
    return fresh
