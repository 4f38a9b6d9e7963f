"""What forward keeps and how often anything is encoded: only what a GEMM will read, once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from support.hybrid_cases import BF16, assert_same, data, layer, step
from support.linear_cases import counting
from torch import Tensor, nn

from aoquant import Cast, HybridConfig, quantize_
from aoquant.layers import function
from aoquant.ops import codec
from aoquant.recipes import get_recipe

M, N, K = 256, 512, 256  # tokens, outputs, inputs: no two alike


def saved(module: nn.Module, x: Tensor) -> list[Tensor]:
    """What autograd is given to keep, parameters apart."""
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in own:
            kept[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        module(x)
    return list(kept.values())


def nbytes(tensors: list[Tensor]) -> int:
    return sum(t.untyped_storage().nbytes() for t in tensors)


def of_input(config: Any) -> float:
    """Bytes kept for each value of x, by a layer whose input needs no gradient, so that it keeps nothing of its
    weight.
    """
    linear, (x, _) = layer(config, n=N, k=K), data(m=M, n=N, k=K)
    return nbytes(saved(linear, x)) / x.numel()


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, int]]:
    """How often a matrix of each shape was encoded, padded as it is, rows and columns in ascending order."""
    count: Counter[tuple[int, ...]] = Counter()
    for name in ("quantize",):
        real = getattr(codec, name)

        def counted(made: Any, x: Tensor, *rest: Any, real: Any = real, **options: Any) -> Any:
            if not x.is_meta:
                count[tuple(sorted(x.shape))] += 1  # type: ignore[arg-type]
            return real(made, x, *rest, **options)

        monkeypatch.setattr(codec, name, counted)
    return count  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("config", "most"),
    [
        (HybridConfig.fwd_bwd("mxfp8", "te-nvfp4"), 0.57),
        (get_recipe("nvfp4-training").prepare(), 0.57),
        (HybridConfig.fwd_bwd(None, "te-nvfp4"), 0.57),
        (HybridConfig.fwd_bwd("te-nvfp4", "mxfp8"), 1.04),
        (HybridConfig.fwd_bwd("mxfp8", "te-fp8-1x128"), 1.04),
        (get_recipe("fp8-hybrid").prepare(), 1.01),
        # from "forward", the smaller of rows and columns
        (HybridConfig.fwd_bwd("te-nvfp4", "mxfp8", save="col").replaced(wgrad_input=Cast("mxfp8", "forward")), 0.57),
        (HybridConfig.fwd_bwd("mxfp8", "te-nvfp4").replaced(wgrad_input=Cast("te-nvfp4", "forward")), 0.57),
        (HybridConfig.fwd_bwd("te-nvfp4", None).replaced(wgrad_input=Cast(None, "forward")), 0.57),
    ],
)
def test_14_bytes_for_each_value_of_the_input(config: Any, most: float) -> None:
    assert of_input(config) <= most


def test_8_double_quantisation_keeps_no_row() -> None:
    config = HybridConfig.fwd_bwd("mxfp8", "te-nvfp4").replaced(wgrad_input=Cast("te-nvfp4", "forward"))
    linear, (x, _) = layer(config, n=N, k=K), data(m=M, n=N, k=K)
    assert {tuple(t.shape) for t in saved(linear, x)} == {(K, M // 2), (K, M // 16), (1, 1)}


@pytest.mark.parametrize("source", ["original", "forward"])
@pytest.mark.parametrize("forward", ["mxfp8", "te-nvfp4", "te-fp8-tensor", None])
@pytest.mark.parametrize("backward", ["te-nvfp4", "mxfp8", "te-fp8-tensor", None])
def test_14_what_is_saved_changes_no_gradient(forward: str | None, backward: str | None, source: str) -> None:
    if forward is backward is None:
        return
    casts = {"dgrad_weight": Cast(backward, source), "wgrad_input": Cast(backward, source)}
    config = HybridConfig.fwd_bwd(forward, backward).replaced(**casts)
    x, g = data()
    assert_same(step(layer(config), x, g), step(layer(config.replaced(save="hp")), x, g))


@pytest.mark.parametrize(
    ("config", "weight", "x", "grad"),
    [
        (HybridConfig.fwd_bwd("mxfp8", "te-nvfp4"), 2, 2, 2),
        (HybridConfig.fwd_bwd("te-fp8-tensor", "te-fp8-tensor"), 1, 1, 1),
        (get_recipe("fp8-hybrid").prepare(), 1, 1, 1),
        (get_recipe("nvfp4-training").prepare(), 1, 2, 2),
        (HybridConfig.fwd_bwd("mxfp8-32x32", "mxfp8-32x32"), 1, 1, 1),
        (HybridConfig.fwd_bwd("mxfp8", None), 1, 1, 0),
        (HybridConfig.fwd_bwd(None, "mxfp8"), 1, 1, 2),
    ],
)
def test_12_encodings_of_a_step(config: Any, weight: int, x: int, grad: int, encoded: Counter[tuple[int, int]]) -> None:
    linear, (inputs, g) = layer(config, n=N, k=K), data(m=128, n=N, k=K)
    hp = linear.prepared.recipe.fprop_weight.name == "high-precision"  # encoding copies: no cast
    encoded.clear()
    step(linear, inputs, g)
    assert encoded[K, N] - hp == weight and encoded[128, K] == x and encoded[128, N] == grad


def test_12_unused_casts_encode_nothing(encoded: Counter[tuple[int, int]]) -> None:
    config = HybridConfig.fwd_bwd("mxfp8", "te-nvfp4")
    linear, (x, g) = layer(config, n=N, k=K), data(m=128, n=N, k=K)

    def step_of(x: Tensor) -> dict[tuple[int, int], int]:
        encoded.clear()
        y = linear(x)
        if y.requires_grad:
            y.backward(g)
        return dict(encoded)

    once = {(K, N): 1, (128, K): 1}
    with torch.no_grad():
        assert step_of(x) == once
    linear.weight.requires_grad_(False)
    linear.bias.requires_grad_(False)
    assert step_of(x) == once, "nothing needs a gradient"
    assert step_of(x.clone().requires_grad_()) == {(K, N): 2, (128, K): 1, (128, N): 1}, "no wgrad"
    linear.weight.requires_grad_(True)
    assert step_of(x) == {(K, N): 1, (128, K): 2, (128, N): 1}, "no dgrad"
    quantize_(nn.ModuleDict({"layer": linear}), HybridConfig.fwd_bwd("mxfp8", None))
    assert step_of(x.clone().requires_grad_()) == once, "a backward in high precision"


class Three(nn.Module):
    """q, k and v of one input."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.q, self.k, self.v = (nn.Linear(K, N, dtype=BF16) for _ in range(3))
        quantize_(self, config)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1  # an inner tensor: it lives while the three read it
        return self.q(x) + self.k(x) + self.v(x)


@pytest.mark.parametrize("name", ["mxfp8-nvfp4", "nvfp4-training"])
def test_a_gpu_makes_both_sides_of_an_input_together(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one op, with the results of two."""
    config, (x, g) = get_recipe(name).prepare(), data()
    want = step(layer(config), x, g)
    monkeypatch.setattr(function, "ONE_PASS", ("cpu",))
    linear = layer(config)
    with counting("encode") as calls:
        got = step(linear, x, g)
    sides = [(c["row"], c["col"]) for c in calls["encode"] if c["x_RK"].shape == x.shape]
    assert len(sides) == 1 and None not in sides[0], "both in one op"
    assert_same(got, want)
    linear.weight.requires_grad_(False)
    with counting("encode") as calls:
        step_of_input = linear(x.clone().requires_grad_())
    assert all(c["col"] is None for c in calls["encode"]), "a column side that no GEMM reads"
    assert torch.equal(step_of_input.detach(), want["y"])


@pytest.mark.parametrize("gpu", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize(
    ("name", "sides", "most"),
    [
        ("mxfp8-nvfp4", 2, 0.57),
        ("nvfp4-training", 2, 0.57),
        ("fp8-hybrid", 1, 1.01),
        ("mxfp8-hp", 1, 2),
        ("nvfp4-hp", 1, 2),
    ],
)
def test_siblings_share_their_input(
    name: str, sides: int, most: float, gpu: bool, encoded: Counter[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """sides: encodings for three layers. most: bytes that they keep for each value of it."""
    if gpu:
        monkeypatch.setattr(function, "ONE_PASS", ("cpu",))
    model, (x, g) = Three(get_recipe(name).prepare()), data(m=128, n=N, k=K)
    encoded.clear()
    y = model(x)
    assert encoded[128, K] == sides
    y.backward(g)
    assert encoded[128, K] == sides
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    assert nbytes(saved(model, x)) <= most * x.numel()
    apart = Three(get_recipe(name).prepare())
    for linear in (apart.q, apart.k, apart.v):
        linear(x.clone()).backward(g)
    assert all(torch.equal(p.grad, g) for p, g in zip(apart.parameters(), grads, strict=True) if p.grad is not None)


def test_siblings_see_a_changed_input() -> None:
    model, (x, _) = Three(get_recipe("mxfp8-nvfp4").prepare()), data(m=128, n=N, k=K)
    inner = x * 1
    first = model.q(inner).detach()
    inner.mul_(2)
    assert torch.equal(model.q(inner.clone()), model.q(inner)) and not torch.equal(model.k(inner), first)
    assert torch.equal(model.k(inner.clone()), model.k(inner))
