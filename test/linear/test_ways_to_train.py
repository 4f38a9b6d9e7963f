"""Whatever a training uses (see KINDS), it can be called, recomputed, compiled, copied, saved and cut into parts as
nn.Linear's training can, and every bit stays.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support import forked
from support.linear_cases import assert_equal
from support.training_cases import KINDS, adamw, assert_same, batch, step, steps, student
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from aoquant import Cast, HybridConfig, QATConfig, quantize_

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
Call = Callable[[Tensor], Tensor]
kinds = pytest.mark.parametrize("kind", KINDS)


def offloaded(model: nn.Module) -> Call:
    def call(x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return model(x)

    return call


CALLS: dict[str, Callable[[nn.Module], Call]] = {
    "recomputed": lambda m: lambda x: checkpoint(m, x, use_reentrant=False),
    "recomputed, reentrant": lambda m: lambda x: checkpoint(m, x.requires_grad_(), use_reentrant=True),
    "offloaded": offloaded,
    "compiled": lambda m: torch.compile(m, backend="aot_eager", fullgraph=True),
    "compiled, recomputed": lambda m: torch.compile(
        lambda x: checkpoint(m, x, use_reentrant=False), backend="aot_eager", fullgraph=True
    ),
    "inductor": lambda m: torch.compile(m, fullgraph=True),
}
OFTEN = {"compiled": ("nvfp4", "learned", "quartet2", "fp8-hybrid", "delayed"), "compiled, recomputed": ("int4-g32",)}


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        pytest.param(k, h, marks=[] if "compile" not in h + "d" or k in OFTEN.get(h, ()) else [pytest.mark.slow])
        for k in KINDS
        for h in CALLS
        if h != "inductor"
    ]
    + [pytest.param(k, "inductor", marks=pytest.mark.slow) for k in ("learned", "quartet2", "nvfp4-training")],
)
def test_how_a_model_is_called_changes_nothing(kind: str, how: str) -> None:
    """Losses, parameters and states (of random numbers, of scales) of three steps."""
    model, other = student(KINDS[kind]), student(KINDS[kind])
    want = steps(model, adamw(model), *batch(), 3)
    assert steps(other, adamw(other), *batch(), 3, call=CALLS[how](other)) == want
    assert want[-1] < want[0] or kind == "delayed"  # whose first factors are 1
    assert_same(dict(other.state_dict()), dict(model.state_dict()))


State = dict[str, Any]


def resumed(kind: str, state: State, model: nn.Module | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Load into fresh objects, of which nothing may survive."""
    model = model or student(KINDS[kind], seed=9, calibrated=False)
    model.load_state_dict(state["model"])
    optimizer = adamw(model)
    optimizer.load_state_dict(state["optimizer"])
    return model, optimizer


def distributed_checkpoint(kind: str, state: State, folder: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
    dcp.save(state, checkpoint_id=folder / "saved")
    model = student(KINDS[kind], seed=9)
    optimizer = adamw(model)
    steps(model, optimizer, *batch(), 1)  # which makes the optimizer's state
    read = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(read, checkpoint_id=folder / "saved")
    return resumed(kind, read, model)


def on_meta(kind: str, state: State, folder: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
    with torch.device("meta"):
        model = student(KINDS[kind], calibrated=False)
    model.load_state_dict(copy.deepcopy(state["model"]), assign=True)
    return resumed(kind, state, model)


CARRIED: dict[str, Callable[[str, State, Path], tuple[nn.Module, torch.optim.Optimizer]]] = {
    "a distributed checkpoint": distributed_checkpoint,
    "the meta device": on_meta,
}


@pytest.mark.parametrize("how", CARRIED)
@kinds
def test_training_resumes_bit_for_bit(kind: str, how: str, tmp_path: Path) -> None:
    """The losses, moments and parameters of two more steps are those of a run that never stopped."""
    model = student(KINDS[kind])
    optimizer = adamw(model)
    steps(model, optimizer, *batch(), 2)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    other, again = CARRIED[how](kind, copy.deepcopy(state), tmp_path)
    assert steps(other, again, *batch(), 2) == steps(model, optimizer, *batch(), 2)
    assert_same(dict(other.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
@kinds
def test_a_copy_is_the_model_and_apart_from_it(kind: str, how: Callable[[nn.Module], nn.Module]) -> None:
    model = student(KINDS[kind])
    steps(model, adamw(model), *batch(), 1)
    before = copy.deepcopy(model.state_dict())
    other = how(model)
    assert [type(m) for m in other.modules()] == [type(m) for m in model.modules()]
    losses = steps(other, adamw(other), *batch(), 2)
    assert_same(dict(model.state_dict()), dict(before))
    assert losses == steps(model, adamw(model), *batch(), 2)


def _resume(folder: Path) -> None:
    """In a new process."""
    for kind in KINDS:
        model, optimizer = resumed(kind, torch.load(folder / f"{kind}.pt", weights_only=True))
        steps(model, optimizer, *batch(), 2)
        torch.save(model.state_dict(), folder / f"{kind}-more.pt")


def test_training_resumes_in_a_new_process(tmp_path: Path) -> None:
    """Every kind in one process: starting it takes longest."""
    want = {}
    for kind in KINDS:
        model = student(KINDS[kind])
        optimizer = adamw(model)
        steps(model, optimizer, *batch(), 2)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / f"{kind}.pt")
        steps(model, optimizer, *batch(), 2)
        want[kind] = dict(model.state_dict())
    forked.call(_resume, tmp_path)
    for kind, state in want.items():
        assert_same(torch.load(tmp_path / f"{kind}-more.pt", weights_only=True), state)


# One layer


def layer(kind: str) -> tuple[nn.Linear, Tensor, Tensor]:
    """A layer after a step (so that delayed scales are there), x and dy."""
    linear, x = student(KINDS[kind])[0], batch()[0]
    g = torch.randn(40, 96, generator=torch.Generator().manual_seed(5))
    step(linear, x, g)
    return linear, x, g


@pytest.mark.parametrize("frozen", ["x", "weight", "bias"])
@kinds
def test_a_frozen_operand_leaves_the_other_gradients(kind: str, frozen: str) -> None:
    """Frozen before forward. Asked for after forward, its gradient is not there, and the next step has it."""
    linear, x, g = layer(kind)
    other = copy.deepcopy(linear)
    want = step(other, x, g)
    leaf = x.clone().requires_grad_(frozen != "x")
    if frozen != "x":
        linear.get_parameter(frozen).requires_grad_(False)
    linear.zero_grad()
    y = linear(leaf)
    linear.requires_grad_(True)
    y.backward(g)
    got = {"x": leaf.grad} | {n: p.grad for n, p in linear.named_parameters()}
    assert got.pop(frozen) is None
    for name in got:
        assert_equal(got[name], want[name], name)
    assert_same(dict(linear.named_buffers()), dict(other.named_buffers()))
    assert_same(step(linear, x, g), step(other, x, g))


@kinds
def test_evaluation_leaves_the_state(kind: str) -> None:
    linear, x, g = layer(kind)
    before, other = copy.deepcopy(linear.state_dict()), copy.deepcopy(linear)
    with torch.no_grad():
        linear(x * 100)
    if kind != "delayed":  # whose forward is a step
        linear(x * 100)  # a forward whose backward never comes
    assert_same(dict(linear.state_dict()), dict(before))
    assert_same(step(linear, x, g), step(other, x, g))


@pytest.mark.parametrize("shape", [(40,), (2, 20), (0,), (2, 0), ()], ids=str)
@kinds
def test_the_shape_of_a_batch_does_not_count(kind: str, shape: tuple[int, ...]) -> None:
    """1-D and 3-D batches, and batches without rows, whose gradients are zero."""
    linear, x, g = layer(kind)
    flat = copy.deepcopy(linear)
    rows = torch.Size(shape).numel()
    x, g = x[:rows], g[:rows]
    wanted = step(flat, x, g)
    got = step(linear, x.reshape(*shape, 64), g.reshape(*shape, 96))
    assert_equal(got["x"].reshape(rows, 64), wanted["x"])
    assert_equal(got["y"].reshape(rows, 96), wanted["y"])
    for name, p in linear.named_parameters():
        assert_equal(got[name], wanted[name], name)
        assert rows or not p.grad.any()


@kinds
def test_micro_batches_add_their_gradients(kind: str) -> None:
    linear, x, g = layer(kind)
    other = copy.deepcopy(linear)
    first, second = step(other, x, g), step(other, 2 * x, g.flip(0))
    linear.zero_grad()
    for xs, gs in ((x, g), (2 * x, g.flip(0))):
        linear(xs).backward(gs)
    for name, p in linear.named_parameters():
        assert_equal(p.grad, first[name] + second[name], name)


@kinds
def test_what_was_trained_is_what_is_deployed(kind: str) -> None:
    """After training, on other shapes and values far beyond those seen."""
    model = student(KINDS[kind])
    steps(model, adamw(model), *batch(), 2)
    x = batch(seed=7)[0]
    inputs = (x, x[0], x[:1], x.view(2, 20, 64), x[:0], 100 * x)
    with torch.no_grad():
        want = [model(t) for t in inputs]
    quantize_(model, QATConfig(step="convert"))
    assert list(model.state_dict()) == list(student(None).state_dict())
    for t, y in zip(inputs, want, strict=True):
        assert y.isfinite().all()
        assert_equal(model(t).detach(), y)


@pytest.mark.parametrize("name", ["fp8-hybrid", "nvfp4-training", "nvfp4"])
def test_an_optimizer_in_a_hook_of_a_compiled_backward(name: str) -> None:
    """Weights change during backward, each behind its own gradient: as the same steps after backward."""
    model, again = student(KINDS[name]), student(KINDS[name])

    def sgd(p: Tensor) -> None:
        with torch.no_grad():
            assert p.grad is not None
            p.sub_(p.grad, alpha=0.1)
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(sgd)
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(3):
        run(batch()[0]).square().sum().backward()
        again(batch()[0]).square().sum().backward()
        for p in again.parameters():
            sgd(p)
    assert_same(dict(model.state_dict()), dict(again.state_dict()))


@pytest.mark.parametrize("kind", ["fp8-hybrid", "mxfp8-nvfp4"])
def test_backward_reads_the_codes_of_forward(kind: str) -> None:
    """Where dgrad reads forward's values, a weight that is written in between changes nothing."""
    linear, x, g = layer(kind)
    want = step(copy.deepcopy(linear), x, g)
    y = linear(leaf := x.clone().requires_grad_())
    with torch.no_grad():
        linear.weight.mul_(2)
    y.backward(g)
    assert leaf.grad is not None and torch.equal(leaf.grad, want["x"])


def test_a_weight_that_backward_reads_must_stay() -> None:
    config = HybridConfig.fwd_bwd("mxfp8", "te-nvfp4").replaced(dgrad_weight=Cast("te-nvfp4"))
    linear, (x, _) = student(config)[0], batch()
    y = linear(x.requires_grad_())
    with torch.no_grad():
        linear.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
