"""Whole steps: recomputed activations, offload, resumption, trajectories and compiled graphs, stochastic rounding
on.
"""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import forked
from support.hybrid_cases import assert_same, data, layer, slope, step, values
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from aoquant import Cast, HybridConfig, PackedWeightConfig, QATConfig, quantize_
from aoquant.recipes import NVFP4_TRAINING, get_recipe

MIXES = ("mxfp8-nvfp4", "fp8-hybrid", "nvfp4-training")


def network(config: Any) -> nn.Sequential:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    quantize_(model, config)
    return model


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(48, 64, generator=generator)
    return x, torch.tanh(x.flip(1))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, n: int) -> list[float]:
    x, target = batch()
    losses = []
    for _ in range(n):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def gradients(model: nn.Module, run: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    x = batch()[0].requires_grad_()
    run(x).square().sum().backward()
    assert x.grad is not None
    return {"input": x.grad, **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize("frozen", ["x", "weight"])
@pytest.mark.parametrize("name", MIXES)
def test_10_one_side_equals_both(name: str, frozen: str) -> None:
    x, g = data()
    wanted = step(layer(get_recipe(name).prepare()), x, g)
    linear = layer(get_recipe(name).prepare())
    linear.weight.requires_grad_(frozen != "weight")
    x.requires_grad_(frozen != "x")
    y = linear(x)
    y.backward(g)
    assert torch.equal(y, wanted["y"])
    got = linear.weight.grad if frozen == "x" else x.grad
    assert got is not None and torch.equal(got, wanted["weight" if frozen == "x" else "x"])


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not-reentrant"])
@pytest.mark.parametrize("name", MIXES)
def test_16_recomputed_activations(name: str, reentrant: bool) -> None:
    model = network(get_recipe(name).prepare(seed=3))
    again = copy.deepcopy(model)
    seen: list[list[Any]] = []

    def watched(x: Tensor) -> Tensor:
        seen.append([])
        if not reentrant:  # torch compares number, shapes and dtypes itself, by hooks that ours would hide
            return model(x)

        def pack(t: Tensor) -> Tensor:
            seen[-1].append((t.dtype, t.contiguous().view(torch.uint8).tolist()))
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            return model(x)

    recomputed = gradients(model, lambda x: checkpoint(watched, x, use_reentrant=reentrant))
    assert len(seen) == 2, "forward ran again"
    kept: list[Any] = []

    def keep(t: Tensor) -> Tensor:
        kept.append((t.dtype, t.contiguous().view(torch.uint8).tolist()))
        return t

    def plain(x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            return again(x)

    assert_same(recomputed, gradients(again, plain))
    assert not reentrant or seen[1] == kept, "the recomputed forward keeps what one without recomputing does"


@pytest.mark.parametrize("name", MIXES)
def test_offload_to_the_cpu(name: str) -> None:
    model = network(get_recipe(name).prepare(seed=3))
    again = copy.deepcopy(model)

    def offloaded(x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return model(x)

    assert_same(gradients(model, offloaded), gradients(again, again))


def resume(directory: str) -> None:
    """In a new process: load what two steps left, and take two more."""
    for name in MIXES:
        model = network(get_recipe(name).prepare(seed=9))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        state = torch.load(Path(directory) / f"{name}-two.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        train(model, optimizer, 2)
        torch.save(model.state_dict(), Path(directory) / f"{name}-four.pt")


def test_17_resumed_in_a_new_process(tmp_path: Path) -> None:
    """Every mix, in one process: starting it takes longest."""
    wanted = {}
    for name in MIXES:
        model = network(get_recipe(name).prepare(seed=3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        train(model, optimizer, 2)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / f"{name}-two.pt")
        train(model, optimizer, 2)
        wanted[name] = dict(model.state_dict())
    forked.call(resume, str(tmp_path))
    for name in MIXES:
        assert_same(torch.load(tmp_path / f"{name}-four.pt", weights_only=True), wanted[name])


@pytest.mark.parametrize("name", MIXES)
def test_a_step_makes_no_tensor_of_python_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each would be a copy that waits for the device, and that no CUDA graph can capture."""
    model = network(get_recipe(name).prepare())

    def refused(*args: Any, **options: Any) -> Tensor:
        raise AssertionError("a tensor of Python numbers")

    x = batch()[0].requires_grad_()
    with monkeypatch.context() as patched:
        for function in ("tensor", "as_tensor", "from_numpy"):
            patched.setattr(torch, function, refused)
        model(x).square().sum().backward()


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "te-nvfp4", "nvfp4"])
def test_22_five_steps_of_adamw(name: str) -> None:
    single, hybrid = (
        network(config)
        for config in (
            QATConfig(PackedWeightConfig(name, name), backward=name),
            HybridConfig.fwd_bwd(name, name).replaced(wgrad_input=Cast(name, "forward")),
        )
    )
    losses = [train(m, torch.optim.AdamW(m.parameters(), lr=1e-3), 5) for m in (single, hybrid)]
    assert losses[0] == losses[1] and all(b < a for a, b in zip(losses[0], losses[0][1:], strict=False))
    assert_same(dict(hybrid.named_parameters()), dict(single.named_parameters()))


@pytest.mark.parametrize("name", MIXES)
def test_22_the_loss_falls(name: str) -> None:
    model = network(get_recipe(name).prepare())
    losses = train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), 5)
    assert all(b < a for a, b in itertools.pairwise(losses))


@pytest.mark.parametrize(
    "name", ["fp8-hybrid", *(pytest.param(n, marks=pytest.mark.slow) for n in ("mxfp8-nvfp4", "nvfp4-training"))]
)
def test_compiled_with_dynamic_tokens(name: str) -> None:
    torch._dynamo.reset()
    model = network(get_recipe(name).prepare(seed=3))
    again, compiled = copy.deepcopy(model), []

    def backend(graph: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        compiled.append(1)
        return aot_eager(graph, inputs)

    run = torch.compile(model, backend=backend, fullgraph=True)
    for rows in (300, 270, 33, 17, 320):  # `formats.scales.absmax` reads 16384 values and more in another way
        x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows))
        for m, f in ((model, run), (again, again)):
            m.zero_grad()
            f(x).square().sum().backward()
        assert_same(
            {n: p.grad for n, p in model.named_parameters() if p.grad is not None},
            {n: p.grad for n, p in again.named_parameters() if p.grad is not None},
        )
    assert len(compiled) <= 2, "the second number of tokens makes it dynamic, the third changes nothing"


def test_24_a_gradient_is_unbiased() -> None:
    """The mean of dW over many draws of a stochastic gradient is dW of the gradient itself."""
    config = HybridConfig(fprop_input=None, fprop_weight="mxfp8", wgrad_grad_output="nvfp4-sr", wgrad_input="te-nvfp4")
    linear, (x, g) = layer(config, torch.float32, n=32, k=32), data(torch.float32, m=64, n=32, k=32)
    exact = step(
        layer(config.replaced(wgrad_grad_output="high-precision", wgrad_input=Cast(None)), torch.float32, n=32, k=32),
        x,
        g,
    )
    draws = torch.stack([step(linear, x, g)["weight"] for _ in range(200)])
    wanted = g.t() @ values("te-nvfp4", x.t().contiguous()).t()
    error, spread = (draws.mean(0) - wanted).abs(), draws.std(0) / 200**0.5
    assert (error <= 5 * spread + 1e-6).all() and not torch.equal(draws[0], draws[1])
    assert abs(slope(draws.mean(0), wanted) - 1) < 0.002
    assert not torch.equal(exact["weight"], wanted)


def test_18_a_prepared_model_is_pickled() -> None:
    model = network(NVFP4_TRAINING.replaced(fprop_input="te-nvfp4", fprop_weight="te-nvfp4-16x16"))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    again = torch.load(buffer, weights_only=False)
    assert_same(gradients(again, again), gradients(model, model))
