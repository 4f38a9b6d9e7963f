"""Delayed scaling: factors follow from the absolute maxima of earlier steps, as TransformerEngine's recipe has it."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from support.hybrid_cases import BF16, data, layer
from support.training_cases import assert_same, step
from torch import Tensor, nn

from aoquant import HybridConfig, PackedWeightConfig, QATConfig, get_format, quantize_
from aoquant.formats import Scales
from aoquant.formats.delayed import advanced, fresh
from aoquant.ops.delayed_scales import absmax

E4M3, E5M2 = "te-fp8-tensor", "te-fp8-e5m2-tensor"


def config(steps: int, select: str = "max") -> HybridConfig:
    made = HybridConfig.fwd_bwd(E4M3, E4M3, amax_history=steps, amax_select=select)
    return made.replaced(dgrad_grad_output=E5M2, wgrad_grad_output=E5M2)


def by_hand(amaxes: list[float], steps: int, select: str, largest: float) -> float:
    """The factor after steps with these absolute maxima: the rule again, in NumPy."""
    factor = np.float32(1)
    for t, _ in enumerate(amaxes):
        window = amaxes[max(0, t + 1 - steps) : t + 1]
        amax = np.float32(max(window) if select == "max" else window[-1])
        if 0 < amax < np.inf:
            with np.errstate(over="ignore"):
                factor = np.float32(min(np.float32(largest) / amax, np.finfo(np.float32).max))
    return float(factor)


@pytest.mark.parametrize("select", ["max", "most_recent"])
@pytest.mark.parametrize("steps", [1, 3, 16, 1024])
def test_the_factor_of_a_history(steps: int, select: str) -> None:
    amaxes = [3.0, 0.0, 100.0, 0.25, 7e-44, 5.0, float("inf"), 2.0]
    state = fresh(1, steps)
    for i, amax in enumerate(amaxes):
        state = advanced(state, torch.tensor([amax]), torch.tensor([448.0]), select)
        wanted = by_hand(amaxes[: i + 1], steps, select, 448.0)
        assert float(state.factor) == wanted, f"after {i + 1} steps"
    assert state.history.shape == (1, steps) and float(state.history[0, 0]) == 0


def trained(linear: nn.Linear, steps: int) -> list[dict[str, Tensor]]:
    found = []
    for i in range(steps):
        x, g = data()
        found.append(step(linear, x * (1 + i), g * 2.0**-i))
    return found


@pytest.mark.parametrize(("steps", "select"), [(16, "max"), (1024, "max"), (16, "most_recent")])
def test_a_layer_encodes_by_the_factors_of_earlier_steps(steps: int, select: str) -> None:
    linear = layer(config(steps, select))
    x, g = data()
    amaxes: list[list[float]] = [[], [], []]
    for i in range(3):
        at = [by_hand(a, steps, select, limit) for a, limit in zip(amaxes, (448.0, 448.0, 57344.0), strict=True)]
        tensors = x * (1 + i), linear.weight.detach(), g * 2.0**-i
        assert linear.amax_factor.tolist() == at
        x_hat, w_hat, g_hat = (
            f.decode(f.encode(t, Scales(torch.full((1, 1), factor))), torch.float32)
            for f, t, factor in zip((get_format(n) for n in (E4M3, E4M3, E5M2)), tensors, at, strict=True)
        )
        got = step(linear, tensors[0], tensors[2])
        bias = linear.bias.detach().float()
        for name, wanted in (("y", x_hat @ w_hat.t() + bias), ("x", g_hat @ w_hat), ("weight", g_hat.t() @ x_hat)):
            error = (got[name].float() - wanted).square().sum() / wanted.square().sum()
            assert error < 1e-5, f"{name} of step {i}: bf16 rounds once"
        for a, t in zip(amaxes, tensors, strict=True):
            a.append(float(t.abs().max()))


@pytest.mark.parametrize("n", [8, 40])
def test_outputs_that_are_no_multiple_of_what_the_kernel_takes_are_padded(n: int) -> None:
    """dy is encoded once, as it is, and the codes of W^T have zeros behind N."""
    linear, (x, g) = layer(config(16), n=n), data(n=n)
    got = step(linear, x, g)
    w_hat, g_hat = (
        f.decode(f.encode(t, Scales(torch.ones(1, 1))), torch.float32)
        for f, t in ((get_format(E4M3), linear.weight.detach()), (get_format(E5M2), g))
    )
    wanted = g_hat @ w_hat
    assert (got["x"].float() - wanted).square().sum() / wanted.square().sum() < 1e-5, "bf16 rounds once"


@pytest.mark.parametrize("margin", [2, -1])
def test_a_margin_makes_factors_smaller(margin: int) -> None:
    """TransformerEngine's scale: (largest / amax) / 2^margin; what a margin below 0 pushes out of range saturates."""
    linear, (x, g) = layer(config(16).replaced(amax_margin=margin)), data()
    step(linear, x, g)
    amaxes = [float(t.abs().max()) for t in (x, linear.weight.detach(), g)]
    factors = [
        float(np.float32(limit) / np.float32(a) / np.float32(2.0**margin))
        for limit, a in zip((448.0, 448.0, 57344.0), amaxes, strict=True)
    ]
    assert linear.amax_factor.tolist() == factors
    x_hat, w_hat = (
        get_format(E4M3).decode(get_format(E4M3).encode(t, Scales(torch.full((1, 1), f))), torch.float32)
        for t, f in zip((x, linear.weight.detach()), factors[:2], strict=True)
    )
    y, got = x_hat @ w_hat.t() + linear.bias.detach().float(), linear(x)
    assert (got.float() - y).square().sum() / y.square().sum() < 1e-5, "bf16 rounds once"
    model = nn.ModuleDict({"layer": linear})
    quantize_(model, QATConfig(PackedWeightConfig(E4M3, E4M3), step="convert"))
    assert torch.equal(model["layer"](x), got), "prepared equals converted"


@pytest.mark.parametrize(("steps", "margin"), [(16, 17), (16, -17), (16, 1.0), (16, True), (0, 2)])
def test_margins_refused(steps: int, margin: Any) -> None:
    with pytest.raises(ValueError, match="amax_margin is a number of bits, -16 to 16, for delayed scaling"):
        config(steps).replaced(amax_margin=margin)


def test_recipes_of_other_histories_read_differently() -> None:
    """A refusal prints both recipes, and a layer's repr its own."""
    options = [{}, {"amax_history": 4}, {"amax_history": 16}, {"amax_history": 4, "amax_select": "most_recent"}]
    options.append({"amax_history": 4, "amax_margin": 2})
    recipes = [layer(HybridConfig.fwd_bwd(E4M3, E4M3, **o)).prepared.recipe for o in options]
    assert len(set(map(str, recipes))) == len(recipes)
    assert "history" not in str(recipes[0])


def test_layers_wake_up_from_the_output_unless_a_large_loss_wakes_them() -> None:
    """As in TransformerEngine: a factor stays 1 while the maximum is 0."""

    def awake(scale: float) -> list[bool]:
        model.zero_grad()
        (model(x).square().mean() * scale).backward()
        return [bool(model[i].weight.grad.any()) for i in range(3)]

    torch.manual_seed(0)
    x, model = torch.randn(16, 64) * 1e-3, nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
    quantize_(model, config(16))
    asleep = copy.deepcopy(model)
    assert [awake(1) for _ in range(4)] == [[False] * 3, [False, False, True], [False, True, True], [True] * 3]
    model = asleep
    assert awake(2**16) == awake(1) == [True] * 3


@pytest.mark.parametrize(("before", "after"), [(16, 1024), (1024, 16), (16, 2), (16, 1), (1, 16)])
def test_a_new_length_keeps_what_fits_of_the_history(before: int, after: int) -> None:
    """As if it had been so from the start, and the factors stay until the next step."""
    model, wanted = (nn.ModuleDict({"layer": layer(config(n))}) for n in (before, after))
    for m in (model, wanted):
        trained(m["layer"], 4)
    factor = model["layer"].amax_factor.clone()
    quantize_(model, config(after))
    assert torch.equal(model["layer"].amax_factor, factor)
    if before > 1:
        assert torch.equal(model["layer"].amax_history, wanted["layer"].amax_history)
    again = trained(model["layer"], 2)
    if min(before, after) >= 16:  # no factor forgot a step
        assert_same(again[1], trained(wanted["layer"], 2)[1])


def test_the_select_is_replaced_and_converted() -> None:
    model = nn.ModuleDict({"layer": layer(config(16))})
    trained(model["layer"], 3)
    before = copy.deepcopy(model.state_dict())
    quantize_(model, config(16, "most_recent"))
    assert_same(dict(model.state_dict()), before)
    trained(model["layer"], 1)
    assert float(model["layer"].amax_factor[0]) == 448 / float(data()[0].abs().max()), "three times that came before"
    quantize_(model, QATConfig(PackedWeightConfig(E4M3, E4M3), step="convert"))
    assert model["layer"].weight.activation.startswith("te-fp8-tensor-static:")


def test_from_scales_of_the_step_and_back() -> None:
    """The forward's formats stay; a history begins empty."""
    model = nn.ModuleDict({"layer": layer(config(0))})
    plain = trained(model["layer"], 1)
    quantize_(model, config(16))
    assert_same(trained(model["layer"], 2)[1], trained(layer(config(16)), 2)[1])
    kept = model.state_dict()
    quantize_(model, config(0))
    assert_same(trained(model["layer"], 1)[0], plain[0])
    assert not any("amax" in key for key in model.state_dict())
    model.load_state_dict(kept)


def test_a_checkpoint_without_a_history_begins_anew() -> None:
    """A part of a checkpoint leaves it; so does its own. A float checkpoint says that the history begins anew."""
    linear, plain = layer(config(16)), layer(None)
    trained(linear, 2)
    factors = linear.amax_factor.tolist()
    assert linear.amax_history.shape == (3, 16) and linear.amax_history.count_nonzero() == 6
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        linear.load_state_dict(copy.deepcopy(linear.state_dict()))
        linear.load_state_dict({"bias": plain.bias}, strict=False)
        assert linear.amax_factor.tolist() == factors
    with pytest.warns(UserWarning, match="has no amax_history"):
        linear.load_state_dict(plain.state_dict())
    assert linear.amax_factor.tolist() == [1, 1, 1]


def test_a_cast_leaves_it_in_float32() -> None:
    model = nn.ModuleDict({"layer": layer(config(16))})
    trained(model["layer"], 1)
    before = model["layer"].amax_factor.clone()
    model.to(BF16).float()
    assert torch.equal(model["layer"].amax_factor, before) and before.dtype == torch.float32


@pytest.mark.parametrize(
    "options",
    [
        {"fprop_input": "mxfp8", "fprop_weight": "mxfp8"},
        {"wgrad_grad_output": E4M3},
        {"save": "hp"},
        {"dgrad_grad_output": None, "dgrad_weight": None},
    ],
)
def test_other_casts_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="delayed scaling is for te-fp8-tensor"):
        layer(config(16).replaced(**options))


@pytest.mark.parametrize("name", ["fp8-tensor", "mxfp8", "te-fp8-128x128"])
def test_formats_with_other_scales_are_refused(name: str) -> None:
    """Also where all six casts agree."""
    with pytest.raises(ValueError, match="delayed scaling is for te-fp8-tensor"):
        layer(HybridConfig.fwd_bwd(name, name, amax_history=16))


def test_the_options_are_checked() -> None:
    for options in ({"amax_history": -1}, {"amax_history": True}, {"amax_select": "mean"}):
        with pytest.raises(ValueError, match="HybridConfig: amax_history"):
            HybridConfig.fwd_bwd(E4M3, E4M3, **options)


def test_the_largest_magnitude_of_nothing_is_zero() -> None:
    assert absmax(torch.empty(0, 8)).tolist() == [0.0]
    assert absmax(torch.tensor([[1.0, -3.0]])).tolist() == [3.0]
