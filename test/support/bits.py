"""Comparisons by bits, for results whose tolerance is zero."""

from __future__ import annotations

import torch
from torch import Tensor

from aoquant.formats import Encoded
from aoquant.linear.tensor import same_bits

PARTS = ("codes", "scale", "zero", "outer")


def same_bytes(a: Tensor | None, b: Tensor | None) -> bool:
    """Return whether dtype, shape and bytes are equal; a missing tensor equals a missing one."""
    if a is None or b is None:
        return a is b
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b.to(a.device))))


def differing(a: Tensor | None, b: Tensor | None) -> int:
    """Count the elements whose bits differ. NaN equals NaN whatever its payload, in which processors differ."""
    assert (a is None) == (b is None)
    if a is None or b is None:
        return 0
    assert a.shape == b.shape and a.dtype == b.dtype
    b = b.to(a.device)
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    unequal = a.contiguous().view(integer) != b.contiguous().view(integer)
    if a.is_floating_point():
        unequal &= ~(a.float().isnan() & b.float().isnan())
    return int(unequal.sum())


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """Return whether no element differs, as `differing` counts."""
    return differing(a, b) == 0


def compare(got: Encoded, want: Encoded, what: str = "") -> None:
    """Assert that no part of an encoded matrix differs, as `differing` counts."""
    assert got.k == want.k, what
    for part, a, b in zip(PARTS, got, want, strict=False):
        n = differing(a, b)
        assert n == 0, f"{what}: {n} of {a.numel() if a is not None else 0} {part} differ"


def unequal_parts(got: Encoded, want: Encoded) -> list[str]:
    """Return the parts of an encoded matrix whose dtypes, shapes or bytes differ."""
    return [part for part, a, b in zip(PARTS, got, want, strict=False) if not same_bytes(a, b)]


def equal_weights(a: Tensor, b: Tensor) -> bool:
    """Return whether two weights are equal, packed ones in all that they hold."""
    return same_bits(a, b) if hasattr(a, "__tensor_flatten__") else torch.equal(a, b)
