"""Encoding and decoding some rows at a time, so that intermediate values stay in a cache.

A format's arithmetic is a dozen passes over the data, each into a new tensor. For a whole weight each tensor is
megabytes, which a CPU's allocator takes from the system and gives back; touching such memory for the first time costs
ten times the arithmetic. A GPU's allocator keeps its memory, but a float32 copy of a weight is twice the weight, and a
conversion cannot afford several of them at once. Tiles that fit the L2 cache cost neither memory nor time. Where a
row's codes depend on that row and on the scales alone, or on whole tiles of rows, the numbers are those of
`Format.encode`, `operand` and `decode`.
"""

from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor

from .base import Encoded, Format
from .operand import Operand

HEALTHY = 0.01  # share of blocks on the floor, of clipped values, or of rows that lose, that is not worth a warning
TILE = 1 << 18  # values; smaller ones cost more in calls than they save
GPU_TILE = 1 << 22  # for encoding on a GPU: 16 MB in float32
BLOCK = 1 << 26  # bytes of a packed weight's values that are there at once, in a GEMM that decodes them
_BLOCK_ROWS = 256  # a block is a multiple of them, and so of every format's tile


def encode(format: Format | Operand, x_RK: Tensor) -> Encoded:
    """format.encode(x_RK), for a format or for an operand with its transform."""
    if isinstance(format, Operand) and format.transform is None:
        format = format.format
    total, k = x_RK.shape
    tile = GPU_TILE if x_RK.is_cuda else TILE
    if total * k < 2 * tile or not (x_RK.is_cuda or x_RK.is_cpu):
        return format.encode(x_RK)
    rows = _rows(total, k, tile, format.tile_rows)
    if rows is None:
        return format.encode(x_RK)
    if format.by_rows or (format.reach == "block" and format.tile_rows > 1):
        return _joined((format.encode(x) for x in x_RK.split(rows)), total, rows, None)
    if format.per_tensor:
        scales = format.measure(x_RK)
        return _joined((format.quantize(x, scales) for x in x_RK.split(rows)), total, rows, (1, 1))
    return format.encode(x_RK)


def _joined(tiles: Iterator[Encoded], total: int, rows: int, shared: tuple[int, ...] | None) -> Encoded:
    """Tiles of `rows` rows, each written into its place: codes are not there twice. shared: shape of what all have."""
    first = next(tiles)
    whole = [
        t if t is None or t.shape == shared else t.new_empty(-(-total * len(t) // rows), *t.shape[1:])
        for t in first.tensors
    ]
    for i, tile in enumerate(chain((first,), tiles)):
        for place, part, one in zip(whole, tile.tensors, first.tensors, strict=True):
            if place is not None and part is not None and one is not None and place is not one:
                place[i * len(one) : i * len(one) + len(part)].copy_(part)
    return Encoded.of(whole, first.k)


def decode(
    format: Format, e: Encoded, dtype: torch.dtype, *, operand: bool = False, out: torch.dtype | None = None
) -> Tensor:
    """format.decode(e, dtype), or format.operand(e, dtype), then cast to `out`, by default the same dtype."""
    total, function, out = e.codes.shape[0], format.operand if operand else format.decode, out or dtype
    tiled = e.codes.is_cpu and total * e.k >= 2 * TILE
    rows = _rows(total, e.k, TILE, format.tile_rows) if tiled else None
    if rows is None:
        return function(e, dtype).to(out)
    y_RK = e.codes.new_empty(total, e.k, dtype=out)
    for tile, part in _cut(format, e, rows):
        y_RK[tile] = function(part, dtype)
    return y_RK


def floored(format: Format, e: Encoded) -> Tensor:
    """Share of format.floored(e), a scalar on e's device."""
    rows = _rows(e.codes.shape[0], e.k, GPU_TILE if e.codes.is_cuda else TILE, format.tile_rows)
    if rows is None:
        return format.floored(e).float().mean()
    counts = [(found.sum(), found.numel()) for found in (format.floored(part) for _, part in _cut(format, e, rows))]
    return torch.stack([count for count, _ in counts]).sum().float() / sum(n for _, n in counts)


def _cut(format: Format, e: Encoded, rows: int) -> Iterator[tuple[slice, Encoded]]:
    """Tiles of `rows` rows: which ones, and their part of e."""
    for start in range(0, e.codes.shape[0], rows):
        tile = slice(start, start + rows)
        yield tile, rows_of(format, e, tile)


def blocks(n: int, row: int) -> list[slice]:
    """Rows of a weight, `row` bytes each: as few blocks as hold BLOCK bytes at most, of about the same size."""
    count = max(1, -(-n * row // BLOCK))
    rows = max(1, -(-n // count // _BLOCK_ROWS)) * _BLOCK_ROWS
    return [slice(start, min(start + rows, n)) for start in range(0, n, rows)] or [slice(0, n)]


def rows_of(format: Format | Operand, e: Encoded, rows: slice) -> Encoded:
    """Some rows of e, views; they begin at a multiple of `format.tile_rows`, and end at one or with e."""
    total, unit = e.codes.shape[0], format.tile_rows
    units = slice(rows.start // unit, -(-rows.stop // unit))
    # a row for each of the matrix, or one for all, or a row for each block of rows
    return e.map(lambda t: t[rows] if t.shape[0] == total else t if t.shape[0] == 1 else t[units])


def _rows(rows: int, k: int, tile: int, unit: int) -> int | None:
    """Rows of a tile, at least two blocks of `unit`; None when everything is one tile."""
    if rows * k < 2 * tile or rows < 4 * unit:
        return None
    return unit * max(2, tile // k // unit)
