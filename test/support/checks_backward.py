"""A quantised backward under tensor and data parallelism: the bytes of one process, random rounding and delayed scales
included.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from typing import Any

import torch
import torch.distributed as dist
from support.distributed_setup import (
    BF16,
    HIDDEN,
    WORLD,
    Ranks,
    check,
    close,
    equal,
    full,
    raises,
    replicate,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from aoquant import Cast, HybridConfig, NVFP4WeightConfig, QATConfig, quantize_
from aoquant.recipes import get_recipe

TOKENS = 128
MIXES: dict[str, Any] = {
    "nvfp4-training": lambda: get_recipe("nvfp4-training").prepare(seed=7),
    "fp8-hybrid": lambda: get_recipe("fp8-hybrid").prepare(),
    "mxfp8-nvfp4": lambda: get_recipe("mxfp8-nvfp4").prepare(),
    "nvfp4-forward": lambda: HybridConfig.fwd_bwd("te-nvfp4", "te-nvfp4").replaced(
        wgrad_input=Cast("te-nvfp4", "forward")
    ),
    "mxfp8-sr": lambda: HybridConfig(
        fprop_input="mxfp8",
        fprop_weight="mxfp8-32x32",
        dgrad_grad_output="mxfp4-sr",
        dgrad_weight="mxfp4",
        wgrad_grad_output="mxfp4-sr",
        wgrad_input="mxfp4",
        seed=3,
    ),
    "quartet": lambda: QATConfig(NVFP4WeightConfig(), backward="quartet", seed=5),
    "eden": lambda: QATConfig(NVFP4WeightConfig(), backward="ms-eden", seed=5),
}


def layer(c: Ranks, mix: str, dtype: torch.dtype = BF16) -> nn.ModuleDict:
    """One prepared layer, equal on all ranks, whose largest values are in one shard alone."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"layer": nn.Linear(HIDDEN, HIDDEN, dtype=dtype, device=c.device)})
    with torch.no_grad():
        model["layer"].weight[0, -1], model["layer"].weight[-1, 0] = 5, -4
    quantize_(model, MIXES[mix]())
    return model


def data(c: Ranks, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor]:
    """x and dy (2, TOKENS / 2, HIDDEN), outliers in one shard."""
    g = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(2, TOKENS // 2, HIDDEN, generator=g) for _ in range(2))
    x[0, 0, 0], dy[0, 0, 0], dy[-1, -1, -1] = 9, 7, -11
    return x.to(c.device, dtype), dy.to(c.device, dtype)


def step(model: nn.ModuleDict, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    x = x.detach().requires_grad_()
    y = model["layer"](x)
    y.backward(dy)
    parameters = dict(model["layer"].named_parameters())
    return {"y": y.detach(), "x": x.grad, **{name: p.grad.clone() for name, p in parameters.items()}}


@check(*((style, mix) for style in ("columns", "rows") for mix in MIXES))
def a_quantised_backward_of_shards_is_one_processs(c: Ranks, style: str, mix: str) -> None:
    """Two steps. ColwiseParallel: y, dW and db bit for bit; RowwiseParallel: dx, dW and db. The other result is a sum
    of two rounded shares.
    """
    columns = style == "columns"
    one, two = layer(c, mix), layer(c, mix)
    parallelize_module(two, c.mesh, {"layer": ColwiseParallel() if columns else RowwiseParallel()})
    x, dy = data(c)
    exact, summed = ("y", "x") if columns else ("x", "y")
    for i in range(2):
        want = step(one, x, dy)
        got = step(two, x, c.half(dy)) if columns else step(two, c.half(x), dy)
        c.same(got[exact], c.half(want[exact]), f"{exact} {i}")
        close(got[summed], want[summed], f"{summed} {i}", 4)
        for name in ("weight", "bias"):
            c.same(full(got[name]), want[name], f"{name} {i}")
    for a, b in zip(one.buffers(), two.buffers(), strict=True):
        equal(b, a, "state of random numbers")


@check("nvfp4-training", "fp8-hybrid", "mxfp8-sr")
def a_quantised_backward_of_tokens_is_one_processs(c: Ranks, mix: str) -> None:
    """A replicated weight, each rank its tokens of every text: y and dx bit for bit; dW is a sum of two shares."""
    for dim in (0, 1):
        one, two = layer(c, mix), layer(c, mix)
        replicate(c, two["layer"])
        x, dy = data(c)
        want = step(one, x, dy)
        x2 = distribute_tensor(x, c.mesh, [Shard(dim)])
        got = step(two, x2, distribute_tensor(dy, c.mesh, [Shard(dim)]))
        c.same(full(got["y"]), want["y"], f"y {dim}")
        c.same(full(got["x"]), want["x"], f"x {dim}")
        close(full(got["weight"]), want["weight"], f"weight {dim}", 4)


@check("FSDP2", "HSDP", "DDP", "FSDP2 recomputed", "DDP compiled", slow=("FSDP2 compiled",))
def data_parallel_ranks_draw_independently(c: Ranks, how: str) -> None:
    """Two steps of two micro-batches: each rank draws under its own seed, and the mean of the gradients is that of one
    process that plays both ranks. The state in the checkpoint is the same on both.
    """
    one, two = layer(c, "nvfp4-training"), layer(c, "nvfp4-training")
    ddp = how.startswith("DDP")
    if ddp:
        model: Any = DistributedDataParallel(nn.Sequential(two["layer"]))
    else:
        mesh = (
            init_device_mesh(c.device, (1, WORLD), mesh_dim_names=("replicate", "shard")) if how == "HSDP" else c.mesh
        )
        model = fully_shard(nn.Sequential(two["layer"]), mesh=mesh)
    played = [copy.deepcopy(one) for _ in range(WORLD)]
    for rank, m in enumerate(played):
        vars(m["layer"])["_data_rank"] = rank
    if how.endswith("recomputed"):
        model.forward = functools.partial(checkpoint, model.forward, use_reentrant=False)
    run = torch.compile(model, backend="aot_eager") if how.endswith("compiled") else model
    x, dy = data(c)
    for i in range(2):
        model.zero_grad()
        for m in played:
            m.zero_grad()
        for last in (False, True):
            seen, wanted = x * (1 + c.rank + last), [x * (1 + r + last) for r in range(WORLD)]
            if ddp:
                with contextlib.nullcontext() if last else model.no_sync():
                    run(seen.requires_grad_()).backward(dy)
            else:
                model.set_requires_gradient_sync(last)
                run(seen.requires_grad_()).backward(dy)
            for m, seen_by in zip(played, wanted, strict=True):
                m["layer"](seen_by.requires_grad_()).backward(dy)
        grads = [[p.grad for p in m.parameters()] for m in played]
        for p, *g in zip(model.parameters(), *grads, strict=True):
            c.same(full(p.grad), sum(g) / WORLD, f"step {i}")
    assert not torch.equal(*(g[0] for g in grads))
    for b in two.buffers():
        states = [torch.empty_like(b) for _ in range(WORLD)]
        dist.all_gather(states, b)
        assert states[0].tolist() == states[1].tolist() and int(b[2]) == 4


@check()
def a_cut_through_a_block_of_backward_is_refused_on_every_rank(c: Ranks) -> None:
    x, _ = data(c)
    for style, mix, words in (
        (ColwiseParallel(), HybridConfig.fwd_bwd("mxfp8", "te-fp8-1x128"), ("te-fp8-1x128", "128 values along N", "multiples of 64")),
        (
            RowwiseParallel(),
            HybridConfig(
                fprop_input="mxfp8", fprop_weight="mxfp8", wgrad_grad_output="te-fp8-1x128", wgrad_input="te-fp8-128x128"
            ),
            ("te-fp8-128x128", "128 values along K", "multiples of 64"),
        ),
    ):  # fmt: skip
        model = nn.ModuleDict({"layer": nn.Linear(HIDDEN, HIDDEN, dtype=BF16, device=c.device)})
        quantize_(model, mix)
        parallelize_module(model, c.mesh, {"layer": style})
        part = x if isinstance(style, ColwiseParallel) else c.half(x)
        raises(lambda m=model, x=part: m["layer"](x), "layer: ", *words)
    dist.barrier()  # no rank is left waiting in a collective


def delayed_model(c: Ranks) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(32, 16)).to(c.device)
    quantize_(made, HybridConfig.fwd_bwd("te-fp8-tensor", "te-fp8-tensor", amax_history=16))
    return made


def tokens(c: Ranks) -> tuple[Tensor, Tensor]:
    """x and dy; the largest of one are among the first tokens, of the other among the last."""
    generator = torch.Generator().manual_seed(1)
    x, g = torch.randn(8, 32, generator=generator), torch.randn(8, 16, generator=generator)
    x[:4] *= 3
    g[4:] *= 5
    return x.to(c.device), g.to(c.device)


@check()
def delayed_scales_are_those_of_all_ranks(c: Ranks) -> None:
    """Each rank trains on its half; the maxima of all tokens are taken by hand."""
    linear, (x, g) = delayed_model(c), tokens(c)
    whole = torch.stack([t.abs().max() for t in (x, linear[0].weight.detach(), g)])
    own = torch.stack(
        [t.abs().max() for t in (x.chunk(WORLD)[c.rank], linear[0].weight.detach(), g.chunk(WORLD)[c.rank])]
    )
    assert not torch.equal(own, whole), "each rank lacks the largest of one tensor"
    for i in range(2):
        linear(x.chunk(WORLD)[c.rank].clone().requires_grad_()).backward(g.chunk(WORLD)[c.rank])
        assert torch.equal(linear[0].amax_history[:, -1], whole), f"step {i}"
        assert torch.equal(linear[0].amax_factor, torch.full_like(whole, 448) / whole), f"step {i}"
    assert linear[0].amax_history.count_nonzero() == 6
