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
    (total, k), unit = x_RK.shape, format.tile_rows
    rows = _rows(x_RK.device, total, k, unit)
    if rows is None:
        return format.encode(x_RK)
    if format.by_rows:
        parts = [format.encode(x) for x in x_RK.split(rows)]
    elif format.per_tensor:
        scales = format.measure(x_RK)
        parts = [format.quantize(x, scales) for x in x_RK.split(rows)]
    else:
        return format.encode(x_RK)
    codes, scale, zero, outer = (_joined(list(field)) for field in zip(*(e[:4] for e in parts), strict=True))
    assert codes is not None
    return Encoded(codes, scale, zero, outer, k)


def _joined(parts: list[Tensor | None]) -> Tensor | None:
    """One field of all tiles; a (1, 1) scale is the same in each, and every other has two rows or more."""
    first = parts[0]
    if first is None or first.shape[0] == 1:
        return first
    with torch.autocast("cpu", enabled=False):  # it promotes what is joined, and knows no float8
        return torch.cat([t for t in parts if t is not None])


def operand(format: Format, e: Encoded, dtype: torch.dtype, out: torch.dtype | None = None) -> Tensor:
    """format.operand(e, dtype), then cast to `out`, by default the same dtype."""
    return _decoded(format, format.operand, e, dtype, out or dtype)


def decode(format: Format, e: Encoded, dtype: torch.dtype) -> Tensor:
    """format.decode(e, dtype)."""
    return _decoded(format, format.decode, e, dtype, dtype)


def _decoded(
    format: Format,
    function: Callable[[Encoded, torch.dtype], Tensor],
    e: Encoded,
    dtype: torch.dtype,
    out: torch.dtype,
) -> Tensor:
    total, unit = e.codes.shape[0], format.tile_rows
    rows = _rows(e.codes.device, total, e.k, unit)
    if rows is None:
        return function(e, dtype).to(out)
    y_RK = torch.empty(total, e.k, dtype=out)
    for start in range(0, total, rows):
        tile, units = slice(start, start + rows), slice(start // unit, (start + rows) // unit)
        # a row for each of the matrix, or for each block of rows, or one for all
        codes, scale, zero, outer = (
            t if t is None or t.shape[0] == 1 else t[tile if t.shape[0] == total else units] for t in e[:4]
        )
        assert codes is not None
        y_RK[tile] = function(Encoded(codes, scale, zero, outer, e.k), dtype)
    return y_RK


def _rows(device: torch.device, rows: int, k: int, unit: int) -> int | None:
    """Rows of a tile, at least two blocks of `unit`; None when everything is one tile."""
    if device.type != "cpu" or rows * k < 2 * TILE or rows < 4 * unit:
        return None
    return unit * max(2, TILE // k // unit)
