"""Micro-batches with fixed weights: each side of a weight is encoded once, and nothing else changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.hybrid_cases import assert_same, data, layer
from torch import Tensor, nn

import aoquant
from aoquant import Cast, HybridConfig, MXFP8WeightConfig, QATConfig
from aoquant.ops import codec
from aoquant.recipes import get_recipe

N, K, M = 256, 128, 64  # no two alike


def config(name: str) -> Any:
    if name == "original":
        return HybridConfig.fwd_bwd("te-nvfp4", "mxfp8").replaced(dgrad_weight=Cast("mxfp8", "original"))
    if name == "hp saved":
        return HybridConfig.fwd_bwd("mxfp8", "te-nvfp4", save="hp")
    if name == "preset":
        return QATConfig(MXFP8WeightConfig(), backward="mxfp8")
    if name == "straight through":
        return QATConfig(MXFP8WeightConfig())
    return get_recipe(name).prepare()


# encodings of the weight, whatever the number of micro-batches; one more for each where a side is drawn
SIDES = {
    "mxfp8-nvfp4": 2, "nvfp4-mxfp8": 2, "fp8-hybrid": 1, "nvfp4-training": 1, "mxfp8-hp": 1, "nvfp4-hp": 1,
    "original": 2, "hp saved": 2, "preset": 2, "straight through": 1,
}  # fmt: skip


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, ...]]:
    count: Counter[tuple[int, ...]] = Counter()
    for name in ("quantize",):
        real = getattr(codec, name)

        def counted(made: Any, x: Tensor, *rest: Any, real: Any = real, **options: Any) -> Any:
            count[tuple(sorted(x.shape))] += not x.is_meta
            return real(made, x, *rest, **options)

        monkeypatch.setattr(codec, name, counted)
    return count


def accumulated(linear: nn.Linear, batches: int) -> dict[str, Tensor]:
    """Gradients of several micro-batches."""
    linear.zero_grad()
    found = {}
    for i in range(batches):
        x, g = data(m=M, n=N, k=K)
        x = (x * (i + 1)).requires_grad_()
        y = linear(x)
        y.backward(g)
        assert x.grad is not None
        found |= {f"y{i}": y.detach(), f"x{i}": x.grad}
    assert linear.weight.grad is not None
    return found | {"weight": linear.weight.grad.clone()}


@pytest.mark.parametrize("name", SIDES)
def test_each_side_is_encoded_once(name: str, encoded: Counter[tuple[int, ...]]) -> None:
    wanted = accumulated(layer(config(name), n=N, k=K), 3)
    linear = layer(config(name), n=N, k=K)
    encoded.clear()
    with aoquant.fixed_weights(nn.ModuleDict({"layer": linear})):
        assert_same(accumulated(linear, 3), wanted)
    assert encoded[K, N] == SIDES[name]
    encoded.clear()
    accumulated(linear, 1)
    assert encoded[K, N] >= SIDES[name], "outside the block every step encodes"


def test_drawn_sides_are_drawn_anew(encoded: Counter[tuple[int, ...]]) -> None:
    wanted = accumulated(layer(get_recipe("quartet").prepare(), n=N, k=K), 2)
    linear = layer(get_recipe("quartet").prepare(), n=N, k=K)
    encoded.clear()
    with aoquant.fixed_weights(linear):
        assert_same(accumulated(linear, 2), wanted)


def test_without_gradients(encoded: Counter[tuple[int, ...]]) -> None:
    linear, (x, _) = layer(config("mxfp8-nvfp4"), n=N, k=K), data(m=M, n=N, k=K)
    with torch.no_grad():
        wanted = linear(x)
        encoded.clear()
        with aoquant.fixed_weights(linear):
            assert torch.equal(linear(x), wanted) and torch.equal(linear(x), wanted)
    assert encoded[K, N] == 1


def _in_place(w: nn.Parameter) -> None:
    with torch.no_grad():
        w.mul_(2)


def _other_data(w: nn.Parameter) -> None:
    w.data = w.data * 2


@pytest.mark.parametrize("write", [_in_place, _other_data])
def test_a_weight_that_changes_is_refused_by_name(write: Callable[[nn.Parameter], None]) -> None:
    model = nn.ModuleDict({"layer": layer(config("mxfp8-nvfp4"), n=N, k=K)})
    x, g = data(m=M, n=N, k=K)
    with aoquant.fixed_weights(model):
        y = model["layer"](x.requires_grad_())
        write(model["layer"].weight)
        with pytest.raises(ValueError, match="layer: its weight, or a scale of it, changed inside"):
            model["layer"](x)
        with pytest.raises(ValueError, match="layer: its weight, or a scale of it, changed inside"):
            y.backward(g)
    model["layer"](x).backward(g)  # afterwards it is a weight like any other


@pytest.mark.parametrize("fused", [True, False])
def test_a_step_of_an_optimizer_changes_a_weight(fused: bool) -> None:
    """A fused one does not move the weight's version."""
    model = nn.ModuleDict({n: layer(config("mxfp8-nvfp4"), n=N, k=K) for n in ("layer", "frozen")})
    model["frozen"].weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    x, g = data(m=M, n=N, k=K)
    with aoquant.fixed_weights(model):
        optimizer.step()  # without gradients, and before a weight is read
        for m in model.values():
            m(x.requires_grad_()).backward(g)
        pending = model["layer"](x)
        optimizer.step()
        with pytest.raises(ValueError, match="layer: its weight, or a scale of it, changed inside"):
            model["layer"](x)
        with pytest.raises(ValueError, match="layer: its weight, or a scale of it, changed inside"):
            pending.backward(g)
        model["frozen"](x)  # no optimizer moved it
    with aoquant.fixed_weights(model):
        model["layer"](x).backward(g)
        others = layer(config("mxfp8-nvfp4"), n=N, k=K)
        others(x).backward(g)
        torch.optim.AdamW(others.parameters(), fused=fused).step()
        model["layer"](x).backward(g)
    model["layer"](x)


def test_another_parameter_is_a_changed_weight() -> None:
    linear, (x, _) = layer(config("fp8-hybrid"), n=N, k=K), data(m=M, n=N, k=K)
    with aoquant.fixed_weights(linear):
        linear(x)
        linear.weight = nn.Parameter(linear.weight.detach().clone())
        with pytest.raises(ValueError, match="its weight, or a scale of it, changed"):
            linear(x)


def test_blocks_nest_and_end_with_an_error() -> None:
    linear, (x, _) = layer(config("fp8-hybrid"), n=N, k=K), data(m=M, n=N, k=K)
    with aoquant.fixed_weights(linear):
        with aoquant.fixed_weights(linear):
            linear(x)
        assert linear.fixed is not None
    with pytest.raises(ValueError, match="K = 128"), aoquant.fixed_weights(linear):
        linear(x[:, 1:])
    assert linear.fixed is None
