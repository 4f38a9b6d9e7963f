"""Clip search: smaller scales for the blocks of a weight whose largest values cost the others more than they are worth.

Each block's values are clamped to a share r of its range before its scale is measured, and r is the one of a grid whose
rounded block errs least on the layer's input: d H d^T, with H the block's part of the Gram matrix (AWQ's clip search,
Lin et al., 2023). An outer scale stays that of the whole weight.
"""

import torch
from torch import Tensor

from aoquant.formats import Encoded, Format, Scales

SHARES = tuple(1 - i / 20 for i in range(11))  # 1, .95, ..., .5


def encode(format: Format, w_NK: Tensor, held: Scales | None, gram_KK: Tensor) -> Encoded:
    """Return codes of a weight (N, K) under the block scales that err least. w_NK: the one that codes are chosen for.
    held: scales whose outer one stays.
    """
    n, k = w_NK.shape
    block, tile = format.block or k, format.tile_rows
    w_NGB = w_NK.unflatten(1, (-1, block))
    high_NG, low_NG = _over_tiles(w_NGB.amax(-1), tile, "amax"), _over_tiles(w_NGB.amin(-1), tile, "amin")
    one = format.reach == "tensor" and format.block is None  # scale for the whole weight
    if one:
        high_NG, low_NG = (t.expand(n, k // block) for t in (high_NG.amax(), low_NG.amin()))
    g = k // block
    h_GBB = torch.stack([gram_KK[i * block : (i + 1) * block, i * block : (i + 1) * block] for i in range(g)])
    outer = format.measure(w_NK).outer if held is None or held.outer is None else held.outer

    def encoded(share_NG: Tensor) -> Encoded:
        limits = ((t * share_NG)[..., None].to(w_NK.dtype) for t in (low_NG, high_NG))
        clamped = w_NGB.clamp(*limits).flatten(1)
        return format.quantize(clamped, format.measure(clamped)._replace(outer=outer))

    best_NG = torch.ones(n, g, dtype=torch.float32, device=w_NK.device)
    least_NG = torch.full_like(best_NG, torch.inf)
    for share in SHARES:
        e = encoded(torch.full_like(best_NG, share))
        d_GNB = (format.decode(e, torch.float32) - w_NK.float()).unflatten(1, (-1, block)).transpose(0, 1)
        error_NG = _over_tiles((d_GNB @ h_GBB).mul_(d_GNB).sum(-1).t(), tile, "sum")
        if one:
            error_NG = error_NG.sum().expand(n, g) / tile
        better = error_NG < least_NG
        best_NG, least_NG = best_NG.where(~better, share), error_NG.where(better, least_NG)
    return encoded(best_NG)


def _over_tiles(of_NG: Tensor, rows: int, how: str) -> Tensor:
    """Return (N, G): the sum, largest or smallest over the rows that share a scale, for each of them."""
    if rows == 1:
        return of_NG
    at = torch.arange(len(of_NG), device=of_NG.device) // rows
    index = at[:, None].expand_as(of_NG)
    tiles = of_NG.new_zeros(int(at[-1]) + 1, of_NG.shape[1])
    return tiles.scatter_reduce(0, index, of_NG, how, include_self=False)[at]
