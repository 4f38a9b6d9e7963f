"""Columns under given scales: for every format the chosen values are decoded ones, and none is nearer."""

from __future__ import annotations

import pytest
import torch
from support.formats import ENGINES, EXTRA
from support.golden_inputs import data_set
from support.linear_cases import BF16
from torch import Tensor

from aoquant.formats import get_format, list_formats, tiles
from aoquant.formats.levels import Levels, packed

FORMATS = [n for n in (*list_formats(), *ENGINES, *EXTRA, "intx4-g32-hqq") if n != "high-precision"]


def nearest(levels: Levels, w_RK: Tensor) -> tuple[Tensor, Tensor]:
    """(values, codes) of all columns, (R, K) each."""
    values, codes = zip(*(levels.nearest(w_R, j) for j, w_R in enumerate(w_RK.t().contiguous())), strict=True)
    return torch.stack(values, 1), torch.stack(codes, 1)


@pytest.mark.parametrize("name", FORMATS)
def test_a_column_gets_the_nearest_deployed_values(name: str) -> None:
    """What is chosen is what the stored codes decode to; it is never farther away than the format's own rounding; and
    deployed values stay what they are.
    """
    fmt, x = get_format(name), data_set("normal", 8, 512, BF16)
    e = fmt.encode(x)
    levels = Levels.of(fmt, e, BF16)
    values, codes = nearest(levels, x.float())
    assert torch.equal(fmt.decode(packed(fmt, e, codes), BF16).float(), values)
    own = fmt.decode(e, BF16).float()
    assert ((values - x.float()).abs() <= (own - x.float()).abs()).all()
    assert torch.equal(nearest(levels, own)[0], own)
    table = levels.values_GRL.gather(-1, torch.zeros_like(levels.codes_GRL[..., :1]).long())
    assert table.isfinite().all()


@pytest.mark.parametrize("name", ["int4-g32", "nvfp4", "nvfp4-row", "fp8-128x128", "gridflip-16x16", "int8-tensor"])
def test_rows_have_the_levels_of_the_whole(name: str) -> None:
    fmt, x = get_format(name), data_set("normal", 200, 256, BF16)
    e = fmt.encode(x)
    whole = fmt.decode(e, BF16)
    for first, last in ((0, 128), (128, 200)):
        part = tiles.rows_of(fmt, e, slice(first, last))
        assert torch.equal(fmt.decode(part, BF16), whole[first:last])
