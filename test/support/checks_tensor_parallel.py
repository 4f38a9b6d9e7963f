"""Tensor and sequence parallelism of prepared and converted layers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from support.bits import unequal_parts
from support.distributed_setup import (
    BF16,
    CONFIGS,
    DTYPES,
    F32,
    HIDDEN,
    MLP,
    WORLD,
    K,
    N,
    Ranks,
    batch,
    check,
    close,
    converts,
    equal,
    full,
    gradients,
    integer_mlp,
    mlp,
    prepare,
    raises,
    replicate,
    sequence_parallel,
    tensor_parallel,
    trace,
    two_of,
)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    parallelize_module,
)

from aoquant import (
    WUSH,
    FP8WeightConfig,
    Int4WeightConfig,
    Int8WeightConfig,
    IntxWeightConfig,
    NVFP4WeightConfig,
    PackedTensor,
    PackedWeightConfig,
    QATConfig,
    calibrate,
    get_format,
    list_formats,
    quantize_,
)
from aoquant.distributed import sharded_linear as sharding
from aoquant.linear import sharded_packed as sharded
from aoquant.linear.function import quantized_linear
from aoquant.linear.prepared import QATLinear
from aoquant.linear.recipe import LinearRecipe
from aoquant.recipes import get_recipe


@check(
    ("nvfp4", "bf16"),
    ("nvfp4-row", "bf16"),
    ("nvfp4-h16", "bf16"),
    ("fp8-tensor", "bf16"),
    ("int8-tensor", "f32"),
    slow=tuple((n, d) for n in CONFIGS for d in DTYPES),
)
def tensor_parallel_equals_one_process(c: Ranks, name: str, dtype_name: str) -> None:
    """Colwise bit-equal; rowwise the sum of the ranks' rounded shares, bit for bit; gradients likewise; codes those of
    the whole.
    """
    dtype = DTYPES[dtype_name]
    one, two = two_of(prepare(mlp(c, dtype), CONFIGS[name]))
    tensor_parallel(c, two)
    x = batch(c, dtype)
    x1, x2 = x.clone().requires_grad_(), x.clone().requires_grad_()
    seen1, seen2 = trace(one), trace(two)
    y1, y2 = one(x1), two(x2)
    c.same(seen2["up.y"].to_local(), c.half(seen1["up.y"]), "colwise forward")
    c.same(seen2["up.y"].full_tensor(), seen1["up.y"], "colwise forward, gathered")
    shares = [share(one.down, seen1["down.x"], r) for r in range(WORLD)]
    c.same(seen2["down.y"].to_local(), shares[c.rank], "one rank's share of rowwise forward")
    c.same(y2, shares[0] + shares[1], "rowwise forward")
    u = torch.finfo(dtype).eps / 2
    bound = u * (shares[0].abs() + shares[1].abs() + 2 * y1.abs()).float() * (1 + 4 * u) + 64 * 2**-24 * HIDDEN**0.5
    assert bool(((y2.float() - y1.float()).abs() <= bound).all()), "rowwise forward beyond its bound"

    grad = torch.randn(y1.shape, generator=torch.Generator().manual_seed(3)).to(c.device, dtype)
    y1.backward(grad)
    y2.backward(grad)
    assert all(p.grad.placements == p.placements for p in two.parameters() if isinstance(p, DTensor))
    for key, got, want in gradients(one, two):
        if key.startswith("norm"):  # downstream of an input gradient that is the sum of two ranks' rounded shares
            close(got, want, key, 8)
        else:
            c.same(got, want, key)
    close(x2.grad, x1.grad, "input gradient", 8)


def share(layer: nn.Module, x: Tensor, rank: int) -> Tensor:
    """What one rank of RowwiseParallel adds, from the whole weight: its columns, the scales of the whole, the bias on
    rank 0.
    """
    assert isinstance(layer, QATLinear)
    recipe, half = layer.prepared.recipe, slice(rank * HIDDEN // WORLD, (rank + 1) * HIDDEN // WORLD)

    def scales(f: Any, t: Tensor) -> Any:
        return None if f is None or f.reach == "block" else f.measure(t.detach().reshape(-1, HIDDEN))

    bias = layer.bias if rank == 0 or layer.bias is None else torch.zeros_like(layer.bias)
    with torch.no_grad():
        w = layer.weight[:, half].contiguous()
        whole = scales(recipe.fprop_input, x), scales(recipe.fprop_weight, layer.weight)
        return quantized_linear(x[..., half], w, bias, recipe, *whole)


@check(("mxfp4", -4, 4), ("int4-g32", -8, 7))
def rowwise_is_bit_equal_where_sums_are_exact(c: Ranks, name: str, low: int, high: int) -> None:
    """Scales are 1 and all sums are integers, so no rounding is left in which one process and two could differ."""
    config = PackedWeightConfig(CONFIGS[name].weight_format().name)
    one, two = two_of(prepare(integer_mlp(c, low, high), config))
    tensor_parallel(c, two)
    x = torch.randint(-2, 3, (2, 3, K), generator=torch.Generator().manual_seed(1)).to(c.device, F32)
    x1, x2 = x.clone().requires_grad_(), x.clone().requires_grad_()
    y1, y2 = one(x1), two(x2)
    equal(y2, y1, "forward")
    y1.sum().backward()
    y2.sum().backward()
    equal(x2.grad, x1.grad, "input gradient")
    for key, got, want in gradients(one, two):
        equal(got, want, key)


@check("some", slow=("all",))
def codes_and_scales_are_those_of_the_whole(c: Ranks, which: str) -> None:
    """Cut along N and along K, unevenly too; `test_extent` has the same without processes, with more kinds of
    numbers.
    """
    some = ("int4-g32", "int8-tensor", "int8-row-asym", "fp8-tensor", "mxfp4", "nvfp4", "fouroversix-row", "gridflip")
    for name in list_formats() if which == "all" else some:
        recipe = LinearRecipe(None, get_format(name))
        w = torch.randn(7, 4 * (recipe.fprop_weight.block or 16), generator=torch.Generator().manual_seed(0)).to(
            c.device
        )
        w[0, -1], w[3] = 50, 0
        want = recipe.fprop_weight.encode(w)
        for placement in (Shard(0), Shard(1), Replicate()):
            cut = distribute_tensor(w, c.mesh, [placement])
            if which == "all" and sharding.why_not(cut, [recipe.fprop_weight], 8):
                continue  # 7 rows are no two tiles, and some scales need all values
            got = sharded.gather(sharded.pack(cut, recipe))
            outer = None if want.outer is None else want.outer.expand(7, 1)
            assert not unequal_parts(got, want._replace(outer=outer)), (name, placement)


@check()
def shards_may_be_uneven_or_empty(c: Ranks) -> None:
    """7 rows over 2 ranks, 1 row over 2 ranks, a batch of no tokens."""
    for n in (7, 1):
        for config in (CONFIGS["nvfp4"], CONFIGS["int8-tensor"]):
            torch.manual_seed(0)
            one, two = two_of(prepare(nn.Sequential(nn.Linear(K, n)).to(c.device), config))
            parallelize_module(two, c.mesh, {"0": ColwiseParallel(output_layouts=Replicate())})
            for rows in (6, 0):
                x = batch(c, F32, rows=rows) if rows else torch.empty(2, 0, K, device=c.device)
                x1, x2 = x.clone().requires_grad_(), x.clone().requires_grad_()
                y1, y2 = one(x1), two(x2)
                c.same(y2, y1, f"{n} rows, {rows} tokens")
                y1.sum().backward()
                y2.sum().backward()
                c.same(full(two[0].weight.grad), one[0].weight.grad, "weight gradient")
            converts(c, one, two, batch(c, F32), None)


@check("nvfp4", "fp8-tensor", "nvfp4-training")
def sequence_parallel_equals_plain_tensor_parallel(c: Ranks, name: str) -> None:
    """Norm on shards of the tokens, gathered before up and scattered after down; and DTensors all the way between the
    layers, which see the same tokens: a backward that rounds at random draws alike.
    """
    drawn = name == "nvfp4-training"
    one, two = two_of(mlp(c, F32))
    for model in (one, two):
        quantize_(model, get_recipe(name).prepare(seed=7) if drawn else QATConfig(CONFIGS[name]))
    tensor_parallel(c, one, use_local_output=False)
    sequence_parallel(c, two)
    x = batch(c, F32, rows=32 if drawn else 6)
    y1, y2 = one(x), two(x)
    assert y2.placements == (Shard(1),)
    equal(y2, y1, "forward")
    y1.square().sum().backward()
    y2.square().sum().backward()
    for key, got, want in gradients(one, two):
        if drawn and key.endswith(".weight") and not key.startswith("norm"):
            equal(got, want, key)
        else:
            close(got, want, key, 8)


@check()
def a_replicated_weight_takes_sharded_tokens(c: Ranks) -> None:
    """Each rank multiplies its tokens; a per-tensor activation scale is that of all tokens; the weight's gradient is
    reduced.
    """
    one, two = two_of(prepare(mlp(c, F32), FP8WeightConfig(granularity="tensor", activation="fp8-tensor")))
    replicate(c, two.up, two.down)
    x = batch(c, F32)
    h1, h2 = one.up(x), two.up(distribute_tensor(x, c.mesh, [Shard(1)]))
    assert h2.placements == (Shard(1),)
    c.same(full(h2), h1, "forward")
    partial = DTensor.from_local(x * (0.5 + c.rank), c.mesh, [Partial()], run_check=False)  # sums to 2 x
    c.same(full(two.up(partial)), one.up(2 * x), "a sum that is pending is made before it is rounded")
    h1.square().sum().backward()
    h2.square().sum().backward()
    assert all(p.grad.placements == (Replicate(),) for p in two.up.parameters())
    for key, got, want in gradients(one.up, two.up):
        close(got, want, key, 8)


@check()
def a_clipped_straight_through_is_that_of_the_whole(c: Ranks) -> None:
    config = QATConfig(NVFP4WeightConfig("static", 0.001, activation="nvfp4-static:0.0005"), straight_through="clipped")
    one, two = two_of(mlp(c, F32))
    for model in (one, two):
        quantize_(model, config)
    tensor_parallel(c, two)
    x = batch(c, F32)
    one(x).sum().backward()
    two(x).sum().backward()
    zeros = int((one.down.weight.grad == 0).sum())
    assert zeros, "nothing was clipped"
    assert int((full(two.down.weight.grad) == 0).sum()) == zeros
    c.same(full(two.down.weight.grad), one.down.weight.grad, "rowwise weight gradient")


@check()
def static_scales_are_cut_like_the_weight(c: Ranks) -> None:
    """Scales that the layer holds: per row of the weight, and one for all activations; learned ones are refused."""
    base = Int8WeightConfig("row", activation="int8-tensor-static")
    one = mlp(c, F32)
    quantize_(one, QATConfig(base, scales="static"))
    calibrate(one, [batch(c, F32)])
    two = tensor_parallel(c, copy.deepcopy(one))
    seen1, seen2 = trace(one), trace(two)
    y1, y2 = one(batch(c, F32)), two(batch(c, F32))
    c.same(full(seen2["up.y"]), seen1["up.y"], "colwise forward")
    close(y2, y1, "forward", 4)
    raises(
        lambda: quantize_(two, QATConfig(step="convert")),
        "sharded layers that hold scales",
        "load it into an unsharded model",
    )
    three = mlp(c, F32)
    quantize_(three, QATConfig(Int8WeightConfig("row"), scales="learned"))
    raises(
        lambda: tensor_parallel(c, three)(batch(c, F32)), "learned scales are not supported under tensor parallelism"
    )
    raises(
        lambda: quantize_(tensor_parallel(c, mlp(c, F32)), QATConfig(base, scales="static")),
        "prepare first, then shard",
    )


@check()
def a_fitted_transform_is_cut_like_the_weight(c: Ranks) -> None:
    """Each rank transforms its part of K by its matrices, and the outer scale is that of all transformed values."""
    one = mlp(c, F32)
    quantize_(one, QATConfig(NVFP4WeightConfig(transform=WUSH(16))))
    calibrate(one, [batch(c, F32)])
    two = tensor_parallel(c, copy.deepcopy(one))
    seen1, seen2 = trace(one), trace(two)
    x1, x2 = batch(c, F32).requires_grad_(), batch(c, F32).requires_grad_()
    y1, y2 = one(x1), two(x2)
    c.same(full(seen2["up.y"]), seen1["up.y"], "colwise forward")
    close(y2, y1, "forward", 4)
    for y in (y1, y2):
        y.square().sum().backward()
    close(x2.grad, x1.grad, "input gradient", 16)
    for key, got, want in gradients(one, two):
        close(got, want, key, 64)
    raises(lambda: quantize_(two, QATConfig(step="convert")), "sharded layers that hold scales")
    raises(lambda: calibrate(two, [batch(c, F32)]), "calibrate first, then shard")


@check()
def prepare_after_parallelize_equals_before(c: Ranks) -> None:
    one, two = two_of(mlp(c, BF16))
    tensor_parallel(c, prepare(one, CONFIGS["nvfp4"]))
    prepare(tensor_parallel(c, two), CONFIGS["nvfp4"])
    x = batch(c, BF16)
    y1, y2 = one(x), two(x)
    equal(y2, y1)
    for y in (y1, y2):
        y.square().mean().backward()
    for key, got, want in gradients(one, two):
        equal(got, want, key)
    converts(c, prepare(mlp(c, BF16), CONFIGS["nvfp4"]), two, x, y1)


@check("nvfp4", "nvfp4-h16", "int4-g32", slow=tuple(n for n in CONFIGS if n not in ("nvfp4", "nvfp4-h16", "int4-g32")))
def tensor_parallel_converted_equals_prepared(c: Ranks, name: str) -> None:
    converts_in_place(c, name, tensor_parallel)


@check("nvfp4", "fp8-tensor", slow=tuple(n for n in CONFIGS if n not in ("nvfp4", "fp8-tensor")))
def sequence_parallel_converted_equals_prepared(c: Ranks, name: str) -> None:
    y = converts_in_place(c, name, sequence_parallel)
    assert y.placements == (Shard(1),), "each rank has its tokens"


def converts_in_place(c: Ranks, name: str, parallel: Callable[[Ranks, nn.Module], nn.Module]) -> Tensor:
    """Return what the converted layers compute: what the prepared ones do, each rank from its own shards."""
    one, two = two_of(prepare(mlp(c, BF16), CONFIGS[name]))
    parallel(c, two)
    x = batch(c, BF16)
    with torch.no_grad():
        want = two(x)
    converts(c, one, two, x, want)
    for layer, shape in ((two.up, (HIDDEN // WORLD, K)), (two.down, (N, HIDDEN // WORLD))):
        local = layer.weight.to_local()
        assert isinstance(local, PackedTensor) and local.shape == shape, "each rank holds its shard"
    with torch.no_grad():
        return two(x)


@check()
def a_cut_through_a_block_is_refused_on_every_rank(c: Ranks) -> None:
    model = MLP(BF16, c.device)
    quantize_(model, QATConfig(Int4WeightConfig(128)), filter_fn=lambda m, fqn: fqn == "down")
    tensor_parallel(c, model)
    words = ("down: int4-g128 covers 128 values along K", "K = 128 over 2 ranks gives each 64", "multiple of 128")
    raises(lambda: model(batch(c, BF16)), *words)
    other = tensor_parallel(c, MLP(BF16, c.device))
    chosen = {"filter_fn": lambda m, fqn: fqn == "down"}
    raises(
        lambda: quantize_(other, QATConfig(Int4WeightConfig(128)), **chosen),
        "down (48, 128)",
        *words[0].split(": ")[1:],
    )
    odd = tensor_parallel(c, nn.ModuleDict({"up": nn.Linear(8, 8), "down": nn.Linear(22, 8)}).to(c.device))
    raises(
        lambda: quantize_(odd, IntxWeightConfig(3, None), **chosen),
        "a byte of codes covers 8 values along K",
        "gives each 11",
    )
    for name in ("stretched2-row", "intx4-row-hqq"):
        raises(
            lambda n=name: quantize_(other, QATConfig(weight_config=n), **chosen),
            "fits its scales to all values",
            "K cannot be sharded",
        )
    dist.barrier()  # nobody is left waiting in a collective


@check()
def operands_that_do_not_go_together_are_refused(c: Ranks) -> None:
    model = tensor_parallel(c, prepare(mlp(c, BF16), CONFIGS["mxfp4"]))
    x = batch(c, BF16)
    raises(
        lambda: QATLinear.forward(model.up, x), "up: ", "weight and bias is a DTensor and its input is a plain tensor"
    )
    raises(lambda: model.up(x[..., :32]), "up: the layer's input needs K = 64")
    raises(lambda: quantize_(model, QATConfig(step="convert"), device="cpu"), "a sharded model stays where its mesh is")
