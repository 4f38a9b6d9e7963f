"""A shard that is encoded under the scales of its whole has the codes of the whole: what every sharded layer stands
on.
"""

import pytest
import torch
import torch.distributed as dist
from support.bits import same
from support.formats import SHARDED_TOO
from support.linear_cases import BF16, F32, data, dtype_name
from torch import Tensor

from aoquant.distributed.shards import extremes, measure
from aoquant.formats import Encoded, Format, get_format, get_operand, list_formats
from aoquant.linear.recipe import LinearRecipe
from aoquant.linear.weight_codes import encoded_sides

FORMATS = [*list_formats(), *SHARDED_TOO]


def values(kind: str, rows: int, k: int, dtype: torch.dtype) -> Tensor:
    """As `data`, or with one NaN, or one Inf, in a corner: the whole must know, whichever shard holds it."""
    x = data("mixed" if kind in ("nan", "inf") else kind, rows, k, dtype)
    if kind in ("nan", "inf"):
        x[0, 0] = float(kind)
    return x


def shards(x: Tensor, dim: int, format: Format) -> tuple[Tensor, ...]:
    """Two parts of unequal size, cut where a byte of codes and a block end."""
    unit = format.tile_rows if dim == 0 else format.block or 8
    return x.split([2 * unit, x.shape[dim] - 2 * unit], dim)


def encode_shards(format: Format, parts: tuple[Tensor, ...], dim: int) -> list[Encoded]:
    """Each part under the scales of the whole, where a scale reaches over the cut."""
    if format.reach == "tensor" or (format.reach == "row" and dim == 1):
        bits = torch.stack([extremes(format, p) for p in parts]).amax(0)
        whole = measure(format, bits, parts[0].dtype)
        return [format.encode(p, whole) for p in parts]
    return [format.encode(p) for p in parts]


def joined(parts: list[Tensor | None], whole: Tensor | None, dim: int) -> Tensor | None:
    """Parts put together, or the one that all of them are."""
    if whole is None or any(p is None for p in parts):
        return None
    tensors = [p for p in parts if p is not None]
    if sum(t.shape[dim] for t in tensors) == whole.shape[dim]:
        # float8 has no cat on every version
        return torch.cat([t.contiguous().view(torch.uint8) for t in tensors], dim).view(whole.dtype)
    assert all(same(t, tensors[0]) for t in tensors)
    return tensors[0]


CUTS = [
    pytest.param(name, dim, id=f"{name}-cut-{'NK'[dim]}")
    for name in FORMATS
    for dim, reaches in ((0, ("tensor",)), (1, ("row", "tensor")))
    if get_format(name).from_extremes or get_format(name).reach not in reaches
]


@pytest.mark.parametrize("dtype", [BF16, pytest.param(F32, marks=pytest.mark.slow)], ids=dtype_name)
@pytest.mark.parametrize(("name", "dim"), CUTS)
def test_shards_encode_to_the_whole(name: str, dtype: torch.dtype, dim: int) -> None:
    format = get_format(name)
    for kind in ("mixed", "nan", "inf"):
        x = values(kind, 6 * format.tile_rows, 5 * (format.block or 16), dtype)
        whole = format.encode(x)
        encoded = encode_shards(format, shards(x, dim, format), dim)
        for field in ("codes", "scale", "zero", "outer"):
            want = getattr(whole, field)
            got = joined([getattr(e, field) for e in encoded], want, dim)
            assert (got is None) == (want is None), (kind, field)
            assert want is None or (got is not None and same(got, want)), (kind, field)


@pytest.mark.parametrize("name", [n for n in FORMATS if get_format(n).from_extremes])
def test_the_clipped_values_of_a_shard_are_those_of_the_whole(name: str) -> None:
    format = get_format(name)
    x = data("mixed", 6 * format.tile_rows, 5 * (format.block or 16), BF16)
    parts = shards(x, 1, format)
    found = [format.saturated(p, e) for p, e in zip(parts, encode_shards(format, parts, 1), strict=True)]
    assert torch.equal(torch.cat(found, 1), format.saturated(x, format.encode(x)))


@pytest.mark.parametrize("name", FORMATS)
def test_reach_is_what_changes_elsewhere_do(name: str) -> None:
    """The codes of the first values stand still when others, out of reach of their scales, grow; and not when
    within.
    """
    format = get_format(name)
    k = 4 * (format.block or 16)
    x = data("normal", 4 * format.tile_rows, k, F32)
    first = format.encode(x)
    for dim, moves in ((0, format.reach == "tensor"), (1, format.reach != "block")):
        y = x.clone()
        y.narrow(dim, x.shape[dim] // 2, x.shape[dim] // 2).mul_(100)
        second = format.encode(y)
        r, c = (format.tile_rows, first.codes.shape[1] // 4)
        same_codes = torch.equal(first.codes[:r, :c].view(torch.uint8), second.codes[:r, :c].view(torch.uint8))
        same_outer = first.outer is None or second.outer is None or torch.equal(first.outer[:1], second.outer[:1])
        assert (same_codes and same_outer) != moves, dim


@pytest.mark.parametrize("name", ["te-fp8-tensor", "te-nvfp4", "int8-row"])
def test_rows_of_a_weight_are_encoded_under_the_scales_of_all_ranks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank's rows are larger, and the reduction over both ranks is the maximum of their extremes."""
    recipe, w = LinearRecipe(None, get_operand(name)), values("mixed", 64, 128, F32)
    mine, theirs, group = w[:32] / 8, w[32:], object()
    whole = recipe.fprop_weight.encode(torch.cat([mine, theirs]))

    def all_reduce(bits: Tensor, op: object, group: object) -> None:
        assert op == dist.ReduceOp.MAX
        groups.append(group)
        torch.maximum(bits, extremes(recipe.fprop_weight.format, theirs), out=bits)

    groups: list[object] = []
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    sides = encoded_sides(recipe, mine, [group])
    assert sides is not None and sides.columns is None
    assert groups == ([] if name == "int8-row" else [group])
    assert same(recipe.fprop_weight.decode(sides.rows, F32), recipe.fprop_weight.decode(whole, F32)[:32])
    assert encoded_sides(recipe, w[:0], [group]) is None
