"""One quantised linear layer over the shards of its operands: tensor and sequence parallelism.

A prepared layer whose weight is a DTensor computes on its shard what the whole layer computes there, and says how the
results belong together. On each dimension of the mesh, the weight's placement decides:

    weight     input           output       input's grad   weight's grad   bias        made by
    Shard(0)   Replicate       Shard(-1)    Partial        Shard(0)        Shard(0)    ColwiseParallel
    Shard(1)   Shard(-1)       Partial      Shard(-1)      Shard(1)        rank 0 has  RowwiseParallel
    Replicate  Shard(tokens)   as input     as input       reduced         Replicate   SequenceParallel around it
    Replicate  Replicate       Replicate    Replicate      Replicate       Replicate

An input in another placement is redistributed first; a Partial one, above all, is summed before it is rounded.

Codes and scales are those of the whole operand, byte for byte. A scale that reaches over the cut (per row of a tensor
sharded along K, per tensor in any case) is made of the extremes of all ranks (shards.py). Formats whose scales end
within a shard communicate nothing. What cannot be cut is refused from shapes alone, by every rank alike: blocks, and
scales that need all values. A quantised backward is the same for its operands (shards.py), which also draw the random
numbers of the whole.

Outputs: Shard(0) and Replicate give columns and rows of what one process computes. Under Shard(1) each rank rounds its
partial sum to the output's dtype and the sum is rounded again, as RowwiseParallel does with any layer: equal where all
sums are exact.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from aoquant.formats import Operand, Scales

from . import shards
from .shards import Backward, Shards


class HeldOperand(NamedTuple):
    """How an operand of the product is encoded, and the scales that it is held to."""

    operand: Operand | None
    held: Scales | None


# (x, w, bias, scales of x, scales of w, parts that backward encodes) of one rank -> y
Local = Callable[[Tensor, Tensor, Tensor | None, Scales | None, Scales | None, Shards | None], Tensor]


def is_sharded(*tensors: Tensor) -> bool:
    """Return whether any of them is a DTensor."""
    for t in tensors:  # noqa: SIM110 - every forward asks, and a generator is a call for each tensor
        if isinstance(t, DTensor):
            return True
    return False


def linear(
    local: Local,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    x_side: HeldOperand,
    w_side: HeldOperand,
    backward: Backward | None = None,
) -> DTensor:
    """y (..., N) of a layer whose weight (N, K) is a DTensor, differentiable in all three.

    x_side, w_side: the operand, None for an input in high precision and for a weight that is encoded already, and held
        scales. backward: the operands of a quantised backward.

    Raises:
        ValueError: an operand is no DTensor of one mesh, a shard would cut through a block, or the layer learns its
            scales.
    """
    _check(x, w, bias)
    assert isinstance(x, DTensor) and isinstance(w, DTensor)
    mesh, last = w.device_mesh, x.ndim - 1
    if reason := why_not(w, (x_side.operand, w_side.operand)):
        raise ValueError(reason)
    rows = [_rule(w_p, x_p, last) for w_p, x_p in zip(w.placements, x.placements, strict=True)]
    layout = _Layout(*zip(*rows, strict=True))

    x = _placed(x, layout.x)
    parts = None if backward is None else Shards.of(x, w)
    if parts is not None and backward is not None and (reason := parts.why_not(backward)):
        raise ValueError(reason)
    x_local = x.to_local(grad_placements=layout.dx)
    # the second redistribution is there for its backward, which adds up the ranks' shares of a replicated weight's
    # gradient
    w_local = w.redistribute(placements=w.placements).to_local(grad_placements=layout.dw)
    bias_local = None
    if isinstance(bias, DTensor):
        bias_local = _placed(bias, layout.b).redistribute(placements=layout.b).to_local(grad_placements=layout.db)
        here = mesh.get_coordinate()
        assert here is not None
        if any(c and p.is_partial() for c, p in zip(here, layout.y, strict=True)):
            bias_local = _Zeros.apply(bias_local)  # type: ignore[no-untyped-call]
    x_scales, w_scales = _scales(x_side, x_local, x), _scales(w_side, w_local, w)
    y_local = local(x_local, w_local, bias_local, x_scales, w_scales, parts)
    return dtensor(y_local, mesh, layout.y, (*x.shape[:-1], w.shape[0]))


def dtensor(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
    """Return the tensor of this shape of which `local` is this rank's part; ranks may have parts of other sizes."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def gathered(
    part: Tensor, mesh: DeviceMesh, have: Sequence[Placement], want: Sequence[Placement], shape: Sequence[int]
) -> Tensor:
    """Return a larger part of a tensor of any dtype and this shape, contiguous. have, want: placements of both parts.

    A collective, of bytes where a value is one: it knows few float8 dtypes.
    """
    raw = part.view(torch.uint8) if part.dtype.itemsize == 1 else part
    placed = dtensor(raw.contiguous(), mesh, have, shape)
    return placed.redistribute(placements=want).to_local().view(part.dtype)


@torch.compiler.disable  # a compiler would round in other places
@torch.no_grad()
def scales(
    operand: Operand, shard: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], matrix: Tensor | None = None
) -> Scales | None:
    """Scales of the whole that `shard` (..., K) is this rank's part of; None when no scale reaches over a cut."""
    last = shard.ndim - 1
    along, across = (shards.groups_of(mesh, placements, dims) for dims in ([last], range(last)))
    if not (operand.reach == "tensor" and across) and not (operand.reach in ("row", "tensor") and along):
        return None
    # what the scales are made of
    values = operand.transformed(shard.reshape(shard.shape[:-1].numel(), shard.shape[-1]), matrix)
    return shards.scales(operand, values, along, across)


@torch.no_grad()
def all_finite(w: Tensor) -> bool:
    """Return whether no value of `w` is NaN or Inf, in any rank's shard: every rank gets one answer (DTensor's own
    `all` gives each its own).
    """
    if not isinstance(w, DTensor):
        return bool(_finite(w))
    finite = _finite(w.to_local()).int()
    for i in range(w.device_mesh.ndim):
        dist.all_reduce(finite, dist.ReduceOp.MIN, group=w.device_mesh.get_group(i))
    return bool(finite)


def _finite(w: Tensor) -> Tensor:
    """Return, as a scalar, whether all of `w` is finite; its extremes carry NaN and Inf, and need no copy of `w`."""
    if not w.numel():
        return w.new_ones((), dtype=torch.bool)
    least, most = torch.aminmax(w)
    return least.isfinite() & most.isfinite()  # joined, autocast would cast them


def why_not(w: Tensor, operands: Sequence[Operand | None], unit: int = 1) -> str | None:
    """Return why a weight (N, K) cannot be encoded shard by shard, from shapes alone; None when it can, and for plain
    tensors.

    unit: of values along K that may not be cut either.
    """
    if not isinstance(w, DTensor):
        return None
    size = list(w.shape)
    for i, placement in enumerate(w.placements):
        dim, ranks = getattr(placement, "dim", None), w.device_mesh.size(i)
        if dim is None or ranks == 1:
            continue
        whole, axis = size[dim], "NK"[dim]
        size[dim] = part = -(-whole // ranks)
        if dim == 1 and part * (ranks - 1) >= whole:
            return (
                f"sharding K = {whole} over {ranks} ranks leaves one with nothing: use ColwiseParallel or fewer ranks"
            )
        blocks = [(f.name, (f.tile_rows, f.period)[dim]) for f in operands if f is not None]
        for name, block in [*blocks, ("a byte of codes", unit if dim == 1 else 1)]:
            if part % block and part < whole:
                return (
                    f"{name} covers {block} values along {axis}, and sharding {axis} = {whole} over {ranks} ranks gives each "
                    f"{part}: shard so that each rank gets a multiple of {block} (ColwiseParallel cuts N, RowwiseParallel K), or "
                    f"choose a block that divides {part}"
                )
        for f in operands:
            if f is not None and not f.from_extremes and (f.reach == "tensor" or (f.reach == "row" and dim == 1)):
                return (
                    f"{f.name} fits its scales to all values of a {f.reach}, so {axis} cannot be sharded: gather the float state "
                    "dict and convert an unsharded model, or choose another format"
                )
    return None


def _scales(side: HeldOperand, shard: Tensor, whole: DTensor) -> Scales | None:
    """The scales of one rank's shard of `whole`: held ones, cut like the shard, or those of the whole."""
    operand, held = side
    mesh, placements = whole.device_mesh, whole.placements
    if operand is None:
        return None
    if held is None:
        return scales(operand, shard, mesh, placements)
    of_k = [Shard(0) if _is_cut(p, whole.ndim - 1) else Replicate() for p in placements]
    matrix = None if held.transform is None else _cut(held.transform, mesh, of_k)
    if held.dynamic:  # a fitted transform alone
        return (scales(operand, shard, mesh, placements, matrix) or Scales())._replace(transform=matrix)
    if any(t is not None and t.requires_grad for t in held.tensors):
        raise ValueError("learned scales are not supported under tensor parallelism: use scales='static'")

    def cut(t: Tensor) -> Tensor:
        """Take the part of held scales that belongs to the shard; one scale for all stays."""
        kept = [p if (d := getattr(p, "dim", None)) in (0, 1) and t.shape[d] > 1 else Replicate() for p in placements]
        return _cut(t, mesh, kept)

    return Scales(*(None if t is None else cut(t) for t in held.tensors))._replace(transform=matrix)


def _cut(t: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """Return this rank's part of a tensor that is equal on all ranks."""
    whole = t if isinstance(t, DTensor) else DTensor.from_local(t, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(placements=placements).to_local()


class _Layout(NamedTuple):
    """Placements, one per mesh dimension, of input, output, bias and of the gradients that one rank computes."""

    x: tuple[Placement, ...]
    y: tuple[Placement, ...]
    dx: tuple[Placement, ...]
    dw: tuple[Placement, ...]
    b: tuple[Placement, ...]
    db: tuple[Placement, ...]


def _rule(w: Placement, x: Placement, last: int) -> tuple[Placement, ...]:
    """`_Layout` of one mesh dimension: the table above."""
    whole = Replicate()
    if w == Shard(0):
        return whole, Shard(last), Partial(), w, w, w
    if w == Shard(1):
        return Shard(last), Partial(), Shard(last), w, whole, whole
    if w != whole:
        raise ValueError(f"the layer's weight must be placed by Shard(0), Shard(1) or Replicate, got {w}")
    if isinstance(x, Shard) and x.dim != last:
        return x, x, x, Partial(), whole, Partial()
    return (whole,) * 6


def _placed(t: DTensor, placements: tuple[Placement, ...]) -> DTensor:
    return t if t.placements == placements else t.redistribute(placements=placements)


def _is_cut(placement: Placement, dim: int | None = None) -> bool:
    """Return whether a placement cuts a tensor, along `dim` if given; FSDP's strided shards do, and are no `Shard`."""
    cut = getattr(placement, "dim", None)
    return cut is not None and dim in (None, cut)


def _check(x: Tensor, w: Tensor, bias: Tensor | None) -> None:
    operands = {"input": x, "weight": w} | ({} if bias is None else {"bias": bias})
    plain = [name for name, t in operands.items() if not isinstance(t, DTensor)]
    if plain:
        sharded = [name for name in operands if name not in plain]
        raise ValueError(
            f"the layer's {' and '.join(sharded)} is a DTensor and its {' and '.join(plain)} is a plain tensor: place it with "
            "parallelize_module (ColwiseParallel, RowwiseParallel) or DTensor.from_local; under FSDP2, call the model that "
            "fully_shard was given, or unshard() it first"
        )
    meshes = {name: t.device_mesh for name, t in operands.items() if isinstance(t, DTensor)}
    if any(m != meshes["weight"] for m in meshes.values()):
        raise ValueError(f"the layer's operands must be on one device mesh, got {meshes}")


class _Zeros(torch.autograd.Function):
    """Zeros for the bias of a rank whose partial sum is not the first; its gradient passes: all ranks hold one bias."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor) -> Tensor:
        return torch.zeros_like(bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad
