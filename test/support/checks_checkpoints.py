"""Distributed checkpoints: resumed bitwise, by as many processes or by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from support.distributed_setup import (
    BF16,
    CONFIGS,
    MLP,
    Ranks,
    adamw,
    batch,
    check,
    equal,
    mlp,
    prepare,
    same_parameters,
    same_state,
    shard,
    tensor_parallel,
    train,
)
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state

from aoquant import (
    QATConfig,
    quantize_,
)
from aoquant.integrations.distributed import full_state_dict
from aoquant.recipes import get_recipe

RESUMED: dict[str, Any] = {
    "fsdp": QATConfig(CONFIGS["fp8-tensor"]),
    "tensor-parallel": QATConfig(CONFIGS["fp8-tensor"]),
    "fsdp-sr": get_recipe("nvfp4-training").prepare(seed=3),
    "tensor-parallel-sr": get_recipe("nvfp4-training").prepare(seed=3),
}


@check(*RESUMED)
def a_checkpoint_resumes_bitwise(c: Ranks, how: str) -> None:
    """Two steps, save, a new model prepared and sharded anew, load, two steps: as four steps without a stop, optimizer
    included.
    """

    def build(seeded: bool) -> nn.Module:
        model = mlp(c, BF16) if seeded else MLP(BF16, c.device)
        quantize_(model, RESUMED[how])
        return shard(c, model) if own else tensor_parallel(c, model)

    own = how.startswith("fsdp")  # ranks of tensor parallelism share their input
    model = build(True)
    optimizer = adamw(model)
    train(c, model, optimizer, 2, own=own)
    directory = c.directory / how
    states = dict(zip(("model", "optimizer"), dcp_state.get_state_dict(model, optimizer), strict=True))
    torch.distributed.checkpoint.save(states, checkpoint_id=directory)
    want = train(c, model, optimizer, 2, first=2, own=own)

    resumed = build(False)
    optimizer2 = adamw(resumed)
    states = dict(zip(("model", "optimizer"), dcp_state.get_state_dict(resumed, optimizer2), strict=True))
    torch.distributed.checkpoint.load(states, checkpoint_id=directory)
    dcp_state.set_state_dict(
        resumed, optimizer2, model_state_dict=states["model"], optim_state_dict=states["optimizer"]
    )
    for step, (got, ref) in enumerate(zip(train(c, resumed, optimizer2, 2, first=2, own=own), want, strict=True)):
        equal(got, ref, f"step {step} after resuming")
    same_parameters(model, resumed)
    # for a world of another size: see `one_process_resumes`
    options = dcp_state.StateDictOptions(full_state_dict=True)
    model_state, optimizer_state = dcp_state.get_state_dict(model, optimizer, options=options)
    if c.rank == 0:
        torch.save((model_state, optimizer_state), directory.with_suffix(".whole"))
    states = dict(zip(("model", "optimizer"), dcp_state.get_state_dict(model, optimizer), strict=True))
    torch.distributed.checkpoint.save(states, checkpoint_id=directory.with_suffix(".last"))


@check("fsdp", "tensor-parallel")
def a_converted_checkpoint_comes_back(c: Ranks, how: str) -> None:
    """DCP of packed shards: into a model that was sharded and converted from other weights."""

    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = prepare(MLP(BF16, c.device), CONFIGS["nvfp4"])
        shard(c, model) if how == "fsdp" else tensor_parallel(c, model)
        quantize_(model, QATConfig(step="convert"))
        return model

    one, two = build(1), build(2)
    torch.distributed.checkpoint.save({"model": one.state_dict()}, checkpoint_id=c.directory / f"packed-{how}")
    state = {"model": two.state_dict()}
    torch.distributed.checkpoint.load(state, checkpoint_id=c.directory / f"packed-{how}")
    two.load_state_dict(state["model"])
    same_state(full_state_dict(two), full_state_dict(one))
    with torch.no_grad():
        equal(two(batch(c, BF16)), one(batch(c, BF16)))


def one_process_resumes(directory: Path, how: str) -> None:
    """In a process of its own kind: the checkpoint that two ranks wrote, read by one, is their state put together."""
    model = MLP(BF16, "cpu")
    quantize_(model, RESUMED[how])
    optimizer = adamw(model)
    states = dict(zip(("model", "optimizer"), dcp_state.get_state_dict(model, optimizer), strict=True))
    torch.distributed.checkpoint.load(states, checkpoint_id=directory / f"{how}.last", no_dist=True)
    dcp_state.set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    want_model, want_optimizer = torch.load(directory / f"{how}.whole", weights_only=False, map_location="cpu")
    same_state(dict(model.state_dict()), want_model)
    got = dcp_state.get_optimizer_state_dict(model, optimizer)["state"]
    assert got.keys() == want_optimizer["state"].keys()
    for key, values in got.items():
        for name, value in values.items():
            equal(value, want_optimizer["state"][key][name].cpu(), f"{key}.{name}")
