"""Shared operands: packed layers that read one input, such as q, k and v or gate and up, encode many rows of it once.

Without gradients autograd keeps nothing, so what one layer made of its input is held here until the input is gone or
another one is encoded in the same thread. The same input means the same tensor object at the same version, on the same
stream.

Some writes move no version counter: those through NumPy, `.data` or a raw pointer. Without gradients they are legal, so
a layer takes codes only where such a write would be strange:

- of a layer with the same parent, which is the module that q, k and v are attributes of. A buffer that feeds two
  models, the blocks of one, or a list of heads, is encoded for each of them.
- of an input whose memory NumPy and other processes cannot write: torch marks such a storage as not resizable.
- never what it took or made before, as in shared_inputs.py.

One case remains: a forward that writes its input through `.data`, or by a kernel of its own, between calls of two of
its own layers. The second layer then multiplies the codes of the input from before the write.

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


class Parent:
    """The module that layers are attributes of, for `is` alone: each of these layers holds the same one."""


class _Latest(threading.local):
    """What the thread encoded last. layers: the identities of those that have it, all of `parent`."""

    x: weakref.ref[Tensor] | None = None
    parent: Parent | None = None
    key: tuple[Any, ...] = ()
    made: Any = None
    layers: set[int]


_latest = _Latest()


def shared(x: Tensor, how: tuple[Any, ...], layer: int, parent: Parent | None, encode: Callable[[], T]) -> T:
    """encode(), or what another layer of the parent made of x in the same way; a layer without one shares nothing.

    how: the operand and dtype. layer: an identity.
    """
    if parent is None or x.is_inference():
        return encode()
    stream = torch._C._cuda_getCurrentRawStream(x.get_device()) if x.is_cuda else 0
    key = (*how, x._version, stream)
    found = _latest.x
    same = found is not None and found() is x and _latest.parent is parent and _latest.key == key
    if same and layer not in _latest.layers and _is_written_by_torch(x):
        _latest.layers.add(layer)
        made: T = _latest.made
        return made
    fresh = encode()
    local = vars(_latest)

    def forget(of: weakref.ref[Tensor]) -> None:
        if local.get("x") is of:
            local.update(x=None, made=None)

    _latest.x, _latest.key, _latest.made, _latest.layers = weakref.ref(x, forget), key, fresh, {layer}
    _latest.parent = parent
    return fresh


def _is_written_by_torch(x: Tensor) -> bool:
    """Whether nothing but torch's own operations writes x, and now rather than when a CUDA graph is replayed."""
    return x.untyped_storage().resizable() and not (x.is_cuda and torch.cuda.is_current_stream_capturing())
