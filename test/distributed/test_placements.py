"""Placements and refusals of sharded layers, in a group of two ranks of which one is here and nothing is sent."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.moe_models import model_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from aoquant import Int4WeightConfig, QATConfig, quantize_, set_fake_quant
from aoquant.distributed import ranks, sharded_linear, shards
from aoquant.distributed.fsdp import is_distributed, layer_class, swap_class
from aoquant.experts import sharded as parallel
from aoquant.formats import Scales, get_operand
from aoquant.planning import stack_changes
from aoquant.planning.changes import Chosen
from aoquant.targets import resolve


@contextmanager
def alone(rank: int, *shape: int) -> Iterator[DeviceMesh]:
    """The mesh of ranks of which this one is here."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=math.prod(shape))
    try:
        yield init_device_mesh("cpu", shape)
    finally:
        dist.destroy_process_group()


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with alone(0, 2) as made:
        yield made


def on(mesh: DeviceMesh, local: torch.Tensor, *placements: Placement) -> DTensor:
    return DTensor.from_local(local, mesh, placements, run_check=False)


def test_shards_that_cut_a_block_are_refused(mesh: DeviceMesh) -> None:
    operands = [get_operand("nvfp4"), None]
    for dim, local, wanted in ((1, (64, 24), "sharding K = 48"), (1, (64, 32), None), (0, (24, 64), None)):
        reason = sharded_linear.why_not(on(mesh, torch.empty(local), Shard(dim)), operands)
        assert (reason is None) == (wanted is None) and (wanted or "") in (reason or ""), reason
    assert sharded_linear.why_not(torch.empty(64, 24), operands) is None
    tiles = sharded_linear.why_not(on(mesh, torch.empty(24, 64), Shard(0)), [get_operand("te-nvfp4-16x16")])
    assert tiles is not None and "sharding N = 48" in tiles


def test_operands_are_placed_and_on_one_mesh(mesh: DeviceMesh) -> None:
    x = on(mesh, torch.randn(4, 6), Replicate())
    assert sharded_linear._placed(x, (Replicate(),)) is x
    cut = sharded_linear._placed(x, (Shard(0),))
    assert cut.placements == (Shard(0),) and torch.equal(cut.to_local(), x.to_local()[:2])
    sharded_linear._check(x, x, None)
    with pytest.raises(ValueError, match="must be placed by"):
        sharded_linear._rule(Partial(), Replicate(), 2)
    with pytest.raises(ValueError, match="plain tensor"):
        sharded_linear._check(x.to_local(), x, None)
    other = init_device_mesh("cpu", (1, 2))
    with pytest.raises(ValueError, match="on one device mesh"):
        sharded_linear._check(on(other, torch.randn(4, 6), Replicate(), Replicate()), x, None)


@pytest.mark.parametrize(
    ("weight", "x", "y", "dx", "bias"),
    [
        (Shard(0), Replicate(), Shard(2), Partial(), Shard(0)),
        (Shard(1), Shard(2), Partial(), Shard(2), Replicate()),
        (Replicate(), Shard(1), Shard(1), Shard(1), Replicate()),
        (Replicate(), Replicate(), Replicate(), Replicate(), Replicate()),
    ],
    ids=["colwise", "rowwise", "sequence", "replicated"],
)
def test_the_weights_placement_decides(
    mesh: DeviceMesh, weight: Placement, x: Placement, y: Placement, dx: Placement, bias: Placement
) -> None:
    """Inputs that are placed so are computed on as they are, and results say which part of the whole they are."""
    shapes = [(2, 4, 8), (6, 8), (6,)]
    given = [on(mesh, torch.randn(s), p).requires_grad_() for s, p in zip(shapes, (x, weight, bias), strict=True)]

    def local(x: Tensor, w: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
        assert bias is not None and [tuple(t.shape) for t in (x, w, bias)] == shapes
        return nn.functional.linear(x, w, bias)

    high_precision = sharded_linear.HeldOperand(None, None)
    made = sharded_linear.linear(local, *given, high_precision, high_precision)
    assert made.placements == (y,) and made.to_local().shape == (2, 4, 6)
    made.to_local().sum().backward()
    # gradients of parameters are summed over the ranks where each has a share
    for t, placement in zip(given, (dx, weight, bias), strict=True):
        assert t.grad is not None and t.grad.placements == (placement,)
        assert t.grad.to_local().shape == t.to_local().shape


def test_a_rank_has_its_part_of_a_fitted_transform(mesh: DeviceMesh) -> None:
    operand, matrix = get_operand("wush32+mxfp4"), torch.randn(4, 32, 32)
    shard = torch.randn(8, 64)
    scales = sharded_linear._scales((operand, Scales(transform=matrix)), shard, on(mesh, shard, Shard(1)))
    assert scales is not None and scales.dynamic and scales.transform is not None
    assert torch.equal(scales.transform, matrix[:2])


def test_experts_are_shared_out_by_expert_alone(mesh: DeviceMesh) -> None:
    module = nn.Module()
    chosen, target = Chosen("experts.weight", module, None), resolve(Int4WeightConfig(32))
    for dim, wanted in ((0, None), (1, "sharded other than by expert")):
        module.weight = nn.Parameter(on(mesh, torch.randn(2, 32, 64), Shard(dim)))
        module.is_transposed = False  # type: ignore[assignment]
        for kind in ("prepare", "quantize"):
            reason = stack_changes.why_not(chosen, kind, target)
            assert (reason is None) == (wanted is None) and (wanted or "") in (reason or ""), (dim, kind, reason)


class JetMoeParallelExperts(nn.Module):
    """Stand for a class that multiplies by its experts in a forward of its own, which the name says."""

    _is_fsdp_managed_module = False


def test_a_class_with_a_forward_of_its_own_is_prepared_sharded_by_fsdp_alone(mesh: DeviceMesh) -> None:
    """FSDP gathers a weight before its module's forward; codes of a shard would reach that forward as they are."""
    module = JetMoeParallelExperts()
    module.weight = nn.Parameter(on(mesh, torch.randn(2, 32, 64), Shard(0)))
    chosen, target = Chosen("experts.weight", module, None), resolve(Int4WeightConfig(32))
    for managed in (False, True):
        module._is_fsdp_managed_module = managed
        for step in ("prepare", "convert", "quantize"):
            refused = "forward of its own" in (stack_changes.why_not(chosen, step, target) or "")
            assert refused is not (managed and step == "prepare"), (managed, step)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_prepared_experts_of_a_rank_take_tokens_of_other_ranks(mesh: DeviceMesh, implementation: str) -> None:
    """Its own experts' part of the sum. Only the class's own forward cannot skip a token, and refuses to run."""
    model = model_of("mixtral")
    model.set_experts_implementation(implementation)
    quantize_(model, QATConfig(Int4WeightConfig(32)))
    experts = model.model.layers[0].mlp.experts
    x, index = torch.randn(6, 64, dtype=torch.bfloat16), torch.tensor([[0, 7], [5, 1], [4, 6], [2, 3], [7, 5], [1, 0]])
    weights = torch.rand(6, 2).bfloat16()
    want = experts(x, index, weights.masked_fill(index >= 4, 0))
    for name in ("gate_up_proj", "down_proj"):
        setattr(experts, name, nn.Parameter(on(mesh, getattr(experts, name).detach()[:4], Shard(0))))
    assert torch.equal(experts(x, index, weights), want)
    set_fake_quant(model, False)
    converted = copy.deepcopy(model)
    quantize_(converted, QATConfig(step="convert"))
    for holds in (experts, converted.model.layers[0].mlp.experts):
        if implementation == "eager":
            with pytest.raises(ValueError, match="set_experts_implementation"):
                holds(x, index, weights)
        else:
            assert holds(x, index, weights).shape == x.shape


@pytest.mark.parametrize(("rank", "wanted"), [(0, (0, 0, 0)), (1, (2, 2, 1)), (2, (4, 4, 1))])
def test_a_ranks_first_expert(rank: int, wanted: tuple[int, ...]) -> None:
    """Of 6, 5 and 1 experts on three ranks, which torch cuts into chunks of 2, 2 and 1."""
    with alone(rank, 3) as mesh:
        for experts, first in zip((6, 5, 1), wanted, strict=True):
            shape = torch.Size((experts, 4, 8))
            chunks = torch.arange(experts).chunk(3)
            local = torch.randn(len(chunks[rank]) if rank < len(chunks) else 0, 4, 8)
            stack = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=(32, 8, 1))
            assert parallel.first_of(stack) == (int(chunks[rank][0]) if rank < len(chunks) else experts)
            assert parallel.first_of(stack) == first


CUT: list[tuple[tuple[int, ...], list[Placement]]] = [
    ((12, 5, 8), [Replicate(), Replicate()]),
    ((12, 5, 8), [Shard(0), Replicate()]),
    ((12, 5, 8), [Replicate(), Shard(0)]),
    ((12, 8), [Shard(0), Shard(0)]),
    ((94, 8), [Shard(0), Shard(0)]),  # parts of parts are not all of one size
    ((4, 6, 8), [Replicate(), Shard(1)]),
    ((4, 6, 8), [Shard(0), Shard(1)]),
    ((1, 6, 8), [Shard(0), Shard(1)]),  # of which half the ranks have nothing
    ((11, 8), [Replicate(), Shard(0)]),
    ((5, 4, 8), [Replicate(), Shard(0)]),
    ((4, 5, 6, 8), [Shard(0), Shard(2)]),
    ((4, 6, 8), [Shard(2), Shard(1)]),
]


@pytest.mark.parametrize(("shape", "placements"), CUT)
def test_a_rank_knows_which_rows_it_has_and_what_all_cuts_are_multiples_of(
    shape: tuple[int, ...], placements: list[Placement]
) -> None:
    begins, units = set[int](), set[int]()
    for rank in range(6):
        with alone(rank, 2, 3) as mesh:
            x = torch.arange(math.prod(shape[:-1])).view(*shape[:-1], 1).expand(shape)
            whole, parts = x, 1
            for i, p in enumerate(placements):
                if isinstance(p, Shard):
                    x = dict(enumerate(x.chunk(mesh.size(i), p.dim))).get(mesh.get_local_rank(i), x[:0])
                    parts *= mesh.size(i) if p.dim < len(shape) - 1 and whole.shape[p.dim] > 1 else 1
            given = DTensor.from_local(x, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())
            axis = shards._axis("M", given, range(len(shape) - 1))
            rows = x[..., 0].flatten()
            assert torch.equal(axis.span.places(len(rows), rows.device), rows)
            assert axis.span.size == math.prod(shape[:-1])
            assert math.prod(g.size() for g in axis.groups) == parts
            units.add(axis.unit)
            begins |= {int(row) for i, row in enumerate(rows) if i == 0 or row != rows[i - 1] + 1}
    assert units == ({0} if parts == 1 else {math.gcd(*begins)})


def test_rows_at_unequal_distances_are_refused() -> None:
    with alone(0, 2, 3) as mesh:
        x = on(mesh, torch.empty(4, 2, 2, 8), Shard(1), Shard(2))
        with pytest.raises(ValueError, match=r"\[1, 2\]"):
            shards._axis("M", x, range(3))


@pytest.mark.parametrize("shape", [(6,), (2, 3), (1, 2, 3)])
def test_a_ranks_place_in_a_mesh_is_its_number(shape: Sequence[int]) -> None:
    for rank in range(6):
        with alone(rank, *shape) as mesh:
            assert ranks.flat_rank(mesh) == rank


def test_a_rank_has_its_part_of_held_scales(mesh: DeviceMesh) -> None:
    """Cut scales of rows and of blocks; keep one scale for all whole."""
    rows, blocks, one = torch.randn(8, 1), torch.randn(8, 4), torch.randn(1, 1)

    def held(t: Tensor, placement: Placement) -> Scales | None:
        side = sharded_linear.HeldOperand(get_operand("int8-row"), Scales(t))
        x = on(mesh, torch.empty(8, 16), placement)
        return sharded_linear._scales(side, x.to_local(), x)

    for placement, parts in (
        (Shard(0), (rows[:4], blocks[:4], one)),
        (Shard(1), (rows, blocks[:, :2], one)),
        (Replicate(), (rows, blocks, one)),
    ):
        for t, part in zip((rows, blocks, one), parts, strict=True):
            for given in (t, on(mesh, t, Replicate())):
                cut = held(given, placement)
                assert cut is not None and cut.scale is not None and torch.equal(cut.scale, part)
    with pytest.raises(ValueError, match="learned"):
        held(rows.clone().requires_grad_(), Shard(0))


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_found_in_a_shard_and_in_a_whole(mesh: DeviceMesh, value: float) -> None:
    w = torch.randn(4, 8)
    w[1, 3] = value
    for t in (w, on(mesh, w, Shard(0))):
        assert sharded_linear.all_finite(t) is (value == 0)
    assert sharded_linear.all_finite(w[:0])


@pytest.mark.parametrize(
    ("name", "dim", "refused"),
    [("int8-row", 1, False), ("int4-e4m3-row-g128", 0, False), ("int4-e4m3-row-g128", 1, True)],
)
def test_scales_that_need_all_values_of_a_row_are_not_cut(mesh: DeviceMesh, name: str, dim: int, refused: bool) -> None:
    reason = sharded_linear.why_not(on(mesh, torch.empty(256, 256), Shard(dim)), [None, get_operand(name)])
    assert (reason is not None) == refused and name in (reason or name)


def test_a_model_is_distributed_where_one_parameter_is(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    assert not is_distributed(model)
    model[1].weight = nn.Parameter(on(mesh, torch.randn(4, 8), Shard(0)))
    assert is_distributed(model)


def test_a_model_is_distributed_while_fsdps_parameters_are_whole(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(model[1], mesh=mesh).unshard()
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    assert is_distributed(model) and not is_distributed(model[0])


def test_sharded_experts_have_one_class_for_each_plain_one() -> None:
    made = parallel.sharded_class(MixtralExperts)
    assert made.plain is MixtralExperts and issubclass(made, MixtralExperts)
    assert made is parallel.sharded_class(made) is parallel.sharded_class(MixtralExperts)
    assert made is not parallel.sharded_class(nn.Linear)


class Other(nn.Linear):
    """Stand for another class of a layer."""


def test_a_layer_changes_its_class_beneath_fsdps(mesh: DeviceMesh) -> None:
    layer = nn.Linear(8, 8)
    swap_class(layer, Other)
    assert type(layer) is layer_class(layer) is Other
    fully_shard(layer, mesh=mesh)
    sharded = type(layer)
    swap_class(layer, nn.Linear)
    assert isinstance(layer, FSDPModule) and layer_class(layer) is nn.Linear and not isinstance(layer, Other)
    assert vars(type(layer)).get("__deepcopy__") is vars(sharded)["__deepcopy__"]
    swap_class(layer, Other)
    assert (type(layer).__name__, type(layer).__mro__[1:]) == (sharded.__name__, sharded.__mro__[1:])


class Drawing(nn.Linear):
    """A layer that asks for its rank in every forward."""

    seen = -1

    def forward(self, x: Tensor) -> Tensor:
        self.seen = ranks.of(self)
        return super().forward(x)


@pytest.mark.parametrize("how", ["FSDP2", "DDP"])
def test_a_layer_that_has_run_is_told_its_rank_once_it_is_distributed(how: str) -> None:
    x = torch.randn(2, 8)
    with alone(1, 2) as mesh:
        layer = Drawing(8, 8)
        ranks.expect(layer)
        model: nn.Module = nn.Sequential(layer)
        model(x)
        assert layer.seen == 0
        if how == "FSDP2":
            fully_shard(model, mesh=mesh)
        else:
            model = DistributedDataParallel(model)
        model(x)
        assert layer.seen == 1
    assert ranks.of(layer) == 1  # which stays: backward recomputes outside of DDP's forward


def test_parts_of_a_dimension_begin_where_torch_cuts_it() -> None:
    def cut(rows: Tensor, cuts: Sequence[int]) -> list[int]:
        if not cuts:
            return [int(rows[0])]
        return [begin for part in rows.chunk(cuts[0]) for begin in cut(part, cuts[1:])]

    for size in (1, 4, 7, 10, 24):
        for cuts in ((), (2,), (4,), (2, 2), (2, 3), (3, 2)):
            assert shards._begins(size, cuts) == cut(torch.arange(size), cuts), (size, cuts)
