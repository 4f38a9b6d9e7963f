"""`quantized_model_init` under wrappers that average gradients by hooks on parameters, on two ranks.

Two references: the prepared float32 model under the same wrapper, and one process that has both ranks' batches and
takes the mean of their gradients. All are equal, bit for bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.two_ranks import Check, average, make
from torch import Tensor, nn
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from aoquant import quantize_, quantized_model_init
from aoquant.recipes import get_recipe

WIDTH = 64
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


class Net(nn.Module):
    """Tied linear layers, a norm beside them, and a layer that only some calls use."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.norm, self.up, self.tied = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.down, self.side = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.tied.weight = self.up.weight

    def forward(self, x: Tensor, side: bool = True) -> Tensor:
        y = self.down(torch.relu(self.tied(torch.relu(self.up(self.norm(x))))))
        return y + self.side(x) if side else y


def recipe() -> Any:
    return get_recipe("fp8-hybrid").prepare()


def batch(step: int, rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank)).to(dtype)


def train(
    rank: int,
    model: nn.Module,
    parameters: list[nn.Parameter],
    micro: int = 1,
    side: Callable[[int], bool] = lambda step: True,
) -> None:
    """Three AdamW steps; all but the last micro-batch of a step without synchronisation."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    for step in range(3):
        for i in range(micro):
            with model.no_sync() if i < micro - 1 else contextlib.nullcontext():  # type: ignore[operator]
                model(batch(7 * step + i, rank), side(step)).square().mean().backward()
        nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        optimizer.zero_grad()


def train_alone(model: nn.Module, micro: int, side: Callable[[int], bool]) -> None:
    """The same steps in one process."""
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    for step in range(3):
        found = []
        for rank in range(2):
            optimizer.zero_grad()
            for i in range(micro):
                model(batch(7 * step + i, rank), side(step)).square().mean().backward()
            found.append([None if p.grad is None else p.grad.clone() for p in parameters])
        for p, a, b in zip(parameters, *found, strict=True):
            p.grad = None if a is None or b is None else (a + b) / 2
        nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        optimizer.zero_grad()


def same_on_both(state: dict[str, Tensor], want: dict[str, Tensor], what: str) -> None:
    assert list(state) == list(want)
    for key, value in state.items():
        assert torch.equal(value, want[key]), f"{what}: {key}: {(value - want[key]).abs().max()}"
        first = value.clone()
        dist.broadcast(first, 0)
        assert torch.equal(value, first), f"{what}: {key} differs between the ranks"


OPTIONS: dict[str, tuple[dict[str, Any], int, Callable[[int], bool]]] = {
    "default": ({}, 1, lambda step: True),
    "init_sync=False": ({"init_sync": False}, 1, lambda step: True),
    "no_sync": ({}, 3, lambda step: True),
    "bucket views": ({"gradient_as_bucket_view": True, "init_sync": False}, 2, lambda step: True),
    "static_graph": ({"static_graph": True}, 1, lambda step: True),
    "find_unused_parameters": ({"find_unused_parameters": True}, 1, lambda step: step != 1),
}


@check
def ddp_averages_the_gradients_of_masters(rank: int, folder: Path) -> None:
    for what, (options, micro, side) in OPTIONS.items():
        # ranks begin with other weights where DDP makes them equal
        seed = 0 if options.get("init_sync") is False else rank
        alone, prepared, packed = Net(), Net(seed), Net(seed)
        for model in (alone, prepared):
            quantize_(model, recipe())
        masters = quantized_model_init(packed, recipe())
        train_alone(alone, micro, side)
        train(rank, DDP(prepared, **options), list(prepared.parameters()), micro, side)
        train(rank, DDP(packed, **options), list(masters.parameters()), micro, side)
        same_on_both(masters.state_dict(), prepared.state_dict(), f"{what}, prepared")
        same_on_both(masters.state_dict(), alone.state_dict(), f"{what}, one process")
        x = batch(99, 0)
        assert torch.equal(packed(x), prepared(x)), what


@check
def a_model_in_bf16(rank: int, folder: Path) -> None:
    """Ranks are equal, and gradients are averaged in float32; recomputed activations too."""
    model = Net(rank).bfloat16()
    masters = quantized_model_init(model, recipe())
    model.down.forward = lambda x, inner=model.down.forward: checkpoint(inner, x, use_reentrant=False)
    parallel, parameters = DDP(model), list(masters.parameters())
    alone = Net().bfloat16()
    quantized_model_init(alone, recipe())
    parallel(batch(0, rank, torch.bfloat16)).float().square().mean().backward()
    wanted = []
    for other in range(2):
        alone.zero_grad()
        alone(batch(0, other, torch.bfloat16)).float().square().mean().backward()
        wanted.append([p.grad for p in alone.parameters()])
    for p, a, b in zip(parameters, *wanted, strict=True):
        assert p.grad.dtype == p.dtype
        assert torch.equal(p.grad, (a + b) / 2)
    assert model.up._parameters["weight"].dtype == torch.float32 and model.up.weight.dtype == torch.bfloat16


@check
def a_compiled_model(rank: int, folder: Path) -> None:
    """A step equals the eager one's, and DDP's first broadcast is noticed in the first backward."""
    models = [Net(rank) for _ in range(3)]
    masters = [quantized_model_init(m, recipe()) for m in models]
    eager, compiled, stale = DDP(models[0]), *(torch.compile(DDP(m), backend="aot_eager") for m in models[1:])
    masters[1].refresh()
    for run, own in ((eager, masters[0]), (compiled, masters[1])):
        optimizer = torch.optim.AdamW(own.parameters(), lr=1e-2)
        for step in range(2):
            run(batch(step, rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    same_on_both(masters[1].state_dict(), masters[0].state_dict(), "compiled")
    with pytest.raises(ValueError, match=r"its float32 master changed.*masters\.refresh\(\)"):
        stale(batch(0, rank)).square().mean().backward()


@check
def other_wrappers_average_too(rank: int, folder: Path) -> None:
    """`replicate`, accelerate, a hook of one's own; and an optimizer whose ranks send each other the parameters."""
    prepared, packed = Net(), Net()
    quantize_(prepared, recipe())
    masters = quantized_model_init(packed, recipe())
    train(rank, DDP(prepared), list(prepared.parameters()))
    for p in masters.parameters():
        p.register_post_accumulate_grad_hook(average)
    train(rank, packed, list(masters.parameters()))
    same_on_both(masters.state_dict(), prepared.state_dict(), "hooks")
    replicated = Net()
    masters = quantized_model_init(replicated, recipe())
    train(rank, replicate(replicated), list(masters.parameters()))
    same_on_both(masters.state_dict(), prepared.state_dict(), "replicate")
    shared, packed = Net(), Net()
    quantize_(shared, recipe())
    masters = quantized_model_init(packed, recipe())
    for model in (shared, packed):
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
        parallel = DDP(model)
        for step in range(3):
            y = parallel(batch(step, rank))
            y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    same_on_both(masters.state_dict(), shared.state_dict(), "ZeRO")
    assert torch.equal(packed(batch(99, 0)), shared(batch(99, 0)))
    from accelerate import Accelerator

    accelerated = Net()
    masters = quantized_model_init(accelerated, recipe())
    wrapped, optimizer = Accelerator(cpu=True).prepare(accelerated, torch.optim.AdamW(masters.parameters(), lr=1e-2))
    assert isinstance(wrapped, DDP)
    for step in range(3):
        wrapped(batch(7 * step, rank)).square().mean().backward()
        nn.utils.clip_grad_norm_(masters.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    same_on_both(masters.state_dict(), prepared.state_dict(), "accelerate")


@check
def what_takes_the_masters_away_is_refused_by_name(rank: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for dtype in (torch.float32, torch.bfloat16):
        model = Net().to(dtype)
        quantized_model_init(model, recipe())
        with pytest.raises(ValueError, match=r"^up: its weight is packed.*fully_shard.*quantized_all_gather"):
            fully_shard(model, mesh=mesh)
        model = Net().to(dtype)
        quantized_model_init(model, recipe())
        parallelize_module(model, mesh, {"down": ColwiseParallel()})
        with pytest.raises(ValueError, match=r"down: its weight is packed.*parallelize_module"):
            model(batch(0, 0, dtype))
    model = Net()
    quantized_model_init(model, recipe())
    with pytest.raises(ValueError, match=r": its weight is packed"):
        FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))(batch(0, 0))


QUICK = ["ddp_averages_the_gradients_of_masters", "what_takes_the_masters_away_is_refused_by_name"]


@pytest.mark.parametrize(
    "names", [QUICK, pytest.param([n for n in CHECKS if n not in QUICK], marks=pytest.mark.slow)], ids=["DDP", "others"]
)
def test_two_ranks_train_packed_weights(names: list[str]) -> None:
    make({name: CHECKS[name] for name in names})
