"""What a training step leaves behind: sides that are dropped, state that is saved, optimizers that step in backward."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support import forked
from support.hybrid_cases import assert_same, data, layer, step
from test_hybrid_training import MIXES, batch, network, train
from torch import Tensor

from aoquant import Cast, HybridConfig
from aoquant.recipes import get_recipe


@pytest.mark.parametrize("name", MIXES)
def test_13_a_dropped_side_does_not_come_back(name: str) -> None:
    """What no gradient asked for in forward is not kept; asking later changes nothing, and the next step is whole."""
    x, g = data()
    wanted = step(layer(get_recipe(name).prepare()), x, g)
    linear = layer(get_recipe(name).prepare())
    linear.weight.requires_grad_(False)
    leaf = x.detach().requires_grad_()
    y = linear(leaf)
    linear.weight.requires_grad_(True)
    y.backward(g)
    assert linear.weight.grad is None and leaf.grad is not None and torch.equal(leaf.grad, wanted["x"])
    linear = layer(get_recipe(name).prepare())
    y = linear(x.detach())  # no dgrad
    y.backward(g)
    assert linear.weight.grad is not None and torch.equal(linear.weight.grad, wanted["weight"])
    with torch.no_grad():
        y = linear(x)
    with pytest.raises(RuntimeError, match="does not require grad"):
        y.backward(g)


def kept(name: str, frozen: str = "") -> int:
    """Bytes that forward keeps for backward. frozen: "x", "weight", or neither."""
    linear, (x, _) = layer(get_recipe(name).prepare()), data()
    linear.weight.requires_grad_(frozen != "weight")
    found: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        found[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        linear(x.requires_grad_(frozen != "x"))
    return sum(found.values())


@pytest.mark.parametrize("name", [*MIXES, "mxfp8-hp", "nvfp4-hp"])
def test_13_each_gradient_keeps_its_own_side(name: str) -> None:
    """Nothing of x for a frozen weight, nothing of the weight for an x without gradient."""
    both, of_weight, of_x = kept(name), kept(name, frozen="weight"), kept(name, frozen="x")
    assert min(of_weight, of_x) > 0 and of_weight + of_x == both


def resume(name: str, folder: Path) -> None:
    """In a new process: load what two steps left, and take two more."""
    model = network(get_recipe(name).prepare(seed=9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, 1)  # which makes the optimizer's state
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=folder / "two")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    train(model, optimizer, 2)
    torch.save(model.state_dict(), folder / "four.pt")


@pytest.mark.parametrize("name", ["nvfp4-training"])
def test_17_distributed_checkpoints_resume_in_a_new_process(name: str, tmp_path: Path) -> None:
    model = network(get_recipe(name).prepare(seed=3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, 2)
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path / "two")
    train(model, optimizer, 2)
    forked.call(resume, name, tmp_path)
    assert_same(torch.load(tmp_path / "four.pt", weights_only=True), dict(model.state_dict()))


@pytest.mark.parametrize("name", ["fp8-hybrid", "nvfp4-training"])
def test_an_optimizer_in_a_hook_of_a_compiled_backward(name: str) -> None:
    """Weights change during backward, each behind its own gradient: as the same steps after backward."""
    torch._dynamo.reset()
    model = network(get_recipe(name).prepare(seed=3))
    again = copy.deepcopy(model)

    def sgd(p: Tensor) -> None:
        with torch.no_grad():
            assert p.grad is not None
            p.sub_(p.grad, alpha=0.1)
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(sgd)
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    x, _ = batch()
    for _ in range(3):
        run(x).square().sum().backward()
        again(x).square().sum().backward()
        for p in again.parameters():
            sgd(p)
    assert_same(dict(model.state_dict()), dict(again.state_dict()))


@pytest.mark.parametrize("name", ["fp8-hybrid", "mxfp8-nvfp4"])
def test_backward_reads_the_codes_of_forward(name: str) -> None:
    """Where dgrad starts from "forward", a weight that is written in between changes nothing."""
    x, g = data()
    wanted = step(layer(get_recipe(name).prepare()), x, g)
    linear = layer(get_recipe(name).prepare())
    leaf = x.detach().requires_grad_()
    y = linear(leaf)
    with torch.no_grad():
        linear.weight.mul_(2)
    y.backward(g)
    assert leaf.grad is not None and torch.equal(leaf.grad, wanted["x"])


def test_a_weight_that_backward_reads_must_stay() -> None:
    x, g = data()
    linear = layer(HybridConfig.fwd_bwd("mxfp8", "te-nvfp4").replaced(dgrad_weight=Cast("te-nvfp4")))
    y = linear(x.detach().requires_grad_())
    with torch.no_grad():
        linear.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(g)
