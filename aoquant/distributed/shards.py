"""Where one rank's operands lie in those of the whole layer: what a quantised backward needs to know of shards.

A layer's three GEMMs have three axes: the rows of the batch M, N and K. A rank has a part of each, and every operand
lies on two of them:

    dgrad   dy (M, N)      W^T (K, N)      along N
    wgrad   dy^T (N, M)    x^T (K, M)      along M

So three facts about each axis are enough:

- where a part begins, since random numbers are drawn by the place in the whole;
- which ranks have the rest, since a scale that reaches over a cut is made of the extremes of all its parts;
- of which number all cuts are multiples, since no cut may go through a block, or through a tile of rows.

The third is found from shapes alone, so all ranks refuse alike, before any rank communicates.
"""

from collections.abc import Sequence
from math import gcd, prod
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from aoquant.formats import Format, Operand, Scales
from aoquant.formats.random import Place, Span
from aoquant.ops.backward import Part, Parts


class Backward(Protocol):
    """The operands of backward that a recipe names; None for high precision."""

    @property
    def dgrad_grad_output(self) -> Operand | None: ...
    @property
    def dgrad_weight(self) -> Operand | None: ...
    @property
    def wgrad_grad_output(self) -> Operand | None: ...
    @property
    def wgrad_input(self) -> Operand | None: ...


class Axis(NamedTuple):
    """A rank's part of one axis.

    groups: of the ranks that have other parts. unit: every part begins at a multiple of it; 0 where the axis is whole.
    """

    name: str
    span: Span
    groups: tuple[dist.ProcessGroup, ...]
    unit: int


class Shards(NamedTuple):
    """A rank's part of a layer: M counts the rows of the batch."""

    m: Axis
    n: Axis
    k: Axis

    @classmethod
    def of(cls, x: DTensor, w: DTensor) -> "Shards":
        """Of an input (..., K) and a weight (N, K) as the layer multiplies them."""
        n, k = (_axis(name, w, [dim]) for dim, name in enumerate("NK"))
        return cls(_axis("the rows of the batch", x, range(x.ndim - 1)), n, k)

    @property
    def dgrad(self) -> Parts:
        """dy (M, N) and W^T (K, N)."""
        return Parts(_part(self.m, self.n), _part(self.k, self.n))

    @property
    def wgrad(self) -> Parts:
        """dy^T (N, M) and x^T (K, M)."""
        return Parts(_part(self.n, self.m), _part(self.k, self.m))

    def why_not(self, recipe: Backward) -> str | None:
        """Return why these parts cannot be encoded one by one; None when they can."""
        operands = (
            (recipe.dgrad_grad_output, self.m, self.n),
            (recipe.dgrad_weight, self.k, self.n),
            (recipe.wgrad_grad_output, self.n, self.m),
            (recipe.wgrad_input, self.k, self.m),
        )
        for operand, rows, columns in operands:
            if operand is not None and (reason := _why_not(operand, rows, columns)):
                return reason
        return None


def _why_not(operand: Operand, rows: Axis, columns: Axis) -> str | None:
    for axis, block in ((columns, operand.period), (rows, operand.tile_rows)):
        if axis.unit % block:
            return (
                f"{operand.name} in backward covers {block} values along {axis.name}, and the ranks' parts of its {axis.span.size} "
                f"begin at multiples of {axis.unit}: shard so that they begin at multiples of {block}, or choose a block that "
                f"divides {axis.unit}"
            )
    cut = columns if columns.groups else rows
    reaches = operand.reach == "tensor" or (operand.reach == "row" and columns.groups)
    if cut.groups and reaches and not operand.from_extremes:
        return f"{operand.name} in backward fits its scales to all values, so {cut.name} cannot be sharded: choose another format"
    return None


def _axis(name: str, t: DTensor, dims: Sequence[int]) -> Axis:
    """The axis that dimensions `dims`, flattened, of `t` are.

    Raises:
        ValueError: two of them are cut, and the first of all is neither: parts are no rows at equal distances then.
    """
    mesh, shape = t.device_mesh, [t.shape[d] for d in dims]
    local, first = compute_local_shape_and_global_offset(t.shape, mesh, t.placements)
    ranks = {d: [mesh.size(i) for i, p in enumerate(t.placements) if getattr(p, "dim", None) == d] for d in dims}
    begins = {d: _begins(t.shape[d], ranks[d]) for d in dims}
    cut = [d for d in dims if len(begins[d]) > 1]  # otherwise the first rank has everything
    groups = tuple(groups_of(mesh, t.placements, cut))
    if not cut:
        return Axis(name, Span(0, prod(shape)), (), 0)
    last = cut[-1]
    if len(cut) > 1 and cut != [0, last]:
        raise ValueError(
            f"a quantised backward takes inputs that are cut along the first dimension and one more, got {cut}"
        )
    inner = {d: prod(shape[i + 1 :]) for i, d in enumerate(dims)}  # of the axis, in one step along each dimension
    begin = sum(first[d] * inner[d] for d in cut)
    unit = gcd(*(b * inner[d] for d in cut for b in begins[d]))
    if last == dims[0]:
        return Axis(name, Span(begin, prod(shape)), groups, unit)
    run, stride = local[last] * inner[last], t.shape[last] * inner[last]
    unit = gcd(unit, stride) if prod(shape) > stride else unit
    return Axis(name, Span(begin, prod(shape), run, stride), groups, unit)


def _begins(size: int, ranks: Sequence[int]) -> list[int]:
    """Return where the parts of a dimension begin that hold anything. ranks: into how many parts each cut cuts one."""
    if not ranks:
        return [0]
    part = -(-size // ranks[0])
    return [at + b for at in range(0, size, part or 1) for b in _begins(min(part, size - at), ranks[1:])]


def _part(rows: Axis, columns: Axis) -> Part:
    def reduced(operand: Operand, values: Tensor) -> Scales | None:
        return scales(operand, values, columns.groups, rows.groups)

    return Part(Place(rows.span, columns.span), reduced)


@torch.compiler.disable  # a compiler would round in other places; a layer that communicates here breaks its graph
@torch.no_grad()
def scales(
    operand: Operand, values_RC: Tensor, along: Sequence[dist.ProcessGroup], across: Sequence[dist.ProcessGroup]
) -> Scales | None:
    """Scales of the whole from the (transformed) values of this rank's part; None when no scale reaches over a cut.

    along, across: groups of ranks that have other columns, and other rows. Such a scale depends on the smallest and the
        largest value alone (`Format.from_extremes`).
    """
    groups = [*along, *across] if operand.reach == "tensor" else along if operand.reach == "row" else []
    if not groups:
        return None
    bits = extremes(operand.format, values_RC)
    for group in groups:
        dist.all_reduce(bits, dist.ReduceOp.MAX, group=group)
    return measure(operand.format, bits, values_RC.dtype)


def extremes(format: Format, x_RK: Tensor) -> Tensor:
    """(R, 2), or (1, 2) for the reach "tensor", int32: how far values lie below and above 0, as bits that the numbers
    are ordered by. Ranks take a maximum of integers, so that NaN survives.
    """
    grouped = x_RK.reshape(1, x_RK.numel()) if format.reach == "tensor" else x_RK
    if format.finite_only:
        grouped = grouped.nan_to_num(0.0, 0.0, 0.0)
    if grouped.shape[1]:  # every format that reaches so far has a code for 0, so 0 is within the extremes
        ends = torch.stack((-grouped.amin(1), grouped.amax(1)), 1).clamp(min=0)
    else:
        ends = grouped.new_zeros(grouped.shape[0], 2)
    return ends.float().abs().view(torch.int32)  # NaN, its sign gone, is above Inf


def measure(format: Format, bits: Tensor, dtype: torch.dtype) -> Scales:
    """Scales of a tensor of `dtype` from the maximum of its shards' `extremes`."""
    below, above = bits.view(torch.float32).to(dtype).unbind(1)
    return format.measure(torch.stack((-below, above), 1))


def groups_of(mesh: DeviceMesh, placements: Sequence[Placement], dims: Sequence[int]) -> list[dist.ProcessGroup]:
    """Groups of the ranks among which those dimensions of a tensor are cut."""
    return [mesh.get_group(i) for i, p in enumerate(placements) if getattr(p, "dim", None) in dims]
