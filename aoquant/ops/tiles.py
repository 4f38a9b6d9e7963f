"""Encoding and decoding on a CPU, some rows at a time, so that what is in between stays in memory that is warm.

A format's arithmetic is a dozen passes over the data, each into a new tensor. For a whole weight each of these is megabytes of
memory that the allocator takes from the system and gives back: touching it for the first time costs ten times the arithmetic.
Where a row's codes depend on that row and on the scales alone, the numbers are those of `Format.encode`, `operand` and `decode`. Other
devices have their own allocators and kernels, and get everything at once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from aoquant.formats import Encoded, Format

TILE = 1 << 18  # values; smaller ones cost more in calls than they save


def encode(format: Format, x_RK: Tensor) -> Encoded:
    """format.encode(x_RK)."""
    rows = _rows(x_RK.device, *x_RK.shape)
    if rows is None:
        return format.encode(x_RK)
    if format.by_rows:
        parts = [format.encode(x) for x in x_RK.split(rows)]
    elif format.per_tensor:
        scales = format.measure(x_RK)
        parts = [format.quantize(x, scales) for x in x_RK.split(rows)]
    else:
        return format.encode(x_RK)
    codes, scale, zero, outer = (_joined(list(field), rows) for field in zip(*(e[:4] for e in parts), strict=True))
    assert codes is not None
    return Encoded(codes, scale, zero, outer, x_RK.shape[1])


def _joined(parts: list[Tensor | None], rows: int) -> Tensor | None:
    """One field of all tiles; a (1, 1) scale is the same in each."""
    first = parts[0]
    if first is None or first.shape[0] != rows:
        return first
    with torch.autocast("cpu", enabled=False):  # it promotes what is joined, and knows no float8
        return torch.cat([t for t in parts if t is not None])


def operand(format: Format, e: Encoded, dtype: torch.dtype, out: torch.dtype | None = None) -> Tensor:
    """format.operand(e, dtype), then cast to `out`, by default the same dtype."""
    return _decoded(format.operand, e, dtype, out or dtype)


def decode(format: Format, e: Encoded, dtype: torch.dtype) -> Tensor:
    """format.decode(e, dtype)."""
    return _decoded(format.decode, e, dtype, dtype)


def _decoded(
    function: Callable[[Encoded, torch.dtype], Tensor], e: Encoded, dtype: torch.dtype, out: torch.dtype
) -> Tensor:
    total = e.codes.shape[0]
    rows = _rows(e.codes.device, total, e.k)
    if rows is None or any(t is not None and t.shape[0] not in (1, total) for t in e[:4]):
        return function(e, dtype).to(out)
    y_RK = torch.empty(total, e.k, dtype=out)
    for start in range(0, total, rows):
        tile = slice(start, start + rows)
        codes, scale, zero, outer = (t if t is None or t.shape[0] != total else t[tile] for t in e[:4])
        assert codes is not None
        y_RK[tile] = function(Encoded(codes, scale, zero, outer, e.k), dtype)
    return y_RK


def _rows(device: torch.device, rows: int, k: int) -> int | None:
    """Rows of a tile, at least two; None when everything is one tile."""
    if device.type != "cpu" or rows * k < 2 * TILE or rows < 4:
        return None
    return max(2, TILE // k)
