"""Bytes that tensors occupy, quantised ones by the tensors that they are made of."""

from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def stored_bytes(*tensors: Tensor) -> int:
    """Bytes that tensors occupy, packed ones by what they hold."""
    total = 0
    for t in tensors:
        if is_traceable_wrapper_subclass(t):
            parts = (getattr(t, name) for name in t.__tensor_flatten__()[0])
            total += stored_bytes(*(part for part in parts if isinstance(part, Tensor)))  # a DTensor has a mesh, too
        else:
            total += t.numel() * t.element_size()
    return total
