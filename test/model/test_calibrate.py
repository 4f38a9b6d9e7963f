"""Calibration: what the forward loop finds, and what it refuses. Static and learned scales afterwards:
test_held_layers.py.
"""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest
import torch
from support.held_cases import CONFIGS, EACH, INT8, Model, batches, prepared, same
from torch import Tensor, nn

from aoquant import (
    WUSH,
    FP8WeightConfig,
    Int8WeightConfig,
    NVFP4WeightConfig,
    PackedTensor,
    QATConfig,
    calibrate,
    get_format,
    quantize_,
    set_fake_quant,
)
from aoquant.calibrate import uncalibrated

# What calibration finds


@pytest.mark.parametrize("name", ["int8", "int8-asym", "fp8", "nvfp4"])
def test_static_on_the_batch_it_was_calibrated_on_is_dynamic(name: str) -> None:
    """One batch: the static scales are those that dynamic quantisation would make, so the outputs agree bit for bit."""
    config, _ = CONFIGS[name]
    static, dynamic = nn.Sequential(Model().up), nn.Sequential(Model().up)
    x = batches(1)[0]
    quantize_(static, QATConfig(config))
    quantize_(dynamic, QATConfig(type(config)(activation=config.activation.removesuffix("-static"))))
    calibrate(static, [x])
    assert torch.equal(static(x), dynamic(x))
    assert not torch.equal(static(x * 0.3), dynamic(x * 0.3))


@pytest.mark.parametrize("widest", ["last", "first"])
@pytest.mark.parametrize("name", ["int8", "int8-asym", "fp8", "nvfp4"])
def test_scales_cover_the_whole_loop(name: str, widest: str) -> None:
    """Those of all batches in one tensor, layer by layer in the float model."""
    model = prepared(name, calibrated=False)
    calibrate(model, batches() if widest == "last" else batches()[::-1])
    for layer, x in ((model.up, batches()), (model.down, [torch.relu(Model().up(x)) for x in batches()])):
        want = layer.prepared.recipe.fprop_input.measure(torch.cat(x).reshape(-1, layer.in_features))
        found = [t for t in want if t is not None]
        got = [getattr(layer, f"input_{part}") for part, t in zip(want._fields, want, strict=True) if t is not None]
        assert got and all(
            torch.equal(a.float().flatten(), b.float().flatten()) for a, b in zip(got, found, strict=True)
        )


def test_the_loop_sees_the_float_model_in_eval_mode_without_gradients_once() -> None:
    model = nn.Sequential(Model().up, nn.Dropout(0.5)).train()
    quantize_(model, QATConfig(INT8))
    model[0].weight.requires_grad_(False)
    set_fake_quant(model, False)
    x, seen = batches(1)[0], []

    def loop(given: nn.Module) -> None:
        assert given is model and not torch.is_grad_enabled() and not given.training
        seen.append(given(x))

    calibrate(model, loop)
    assert len(seen) == 1 and torch.equal(seen[0], Model().up(x))
    assert model.training and model[1].training and not model[0].fake_quant and torch.is_grad_enabled()
    assert not model[0]._forward_pre_hooks


def test_batches_may_be_tuples_and_dicts_and_come_from_a_generator() -> None:
    a, b = prepared("int8", calibrated=False), prepared("int8")
    one, two, three = batches()
    calibrate(a, (batch for batch in (one, (two,), {"x": three})))
    assert torch.equal(a.up.input_scale, b.up.input_scale)


def test_under_autocast_the_range_is_that_of_what_is_quantised() -> None:
    model = nn.Sequential(nn.Linear(32, 16))
    quantize_(model, QATConfig(INT8))
    x = torch.full((2, 32), 1.001)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        calibrate(model, [x])
    assert torch.equal(model[0].input_scale, get_format("int8-tensor").measure(x.bfloat16()).scale.float())


@EACH
def test_a_second_calibration_replaces_the_first_in_place(name: str) -> None:
    model = prepared(name)
    before = {
        n: (id(t), t.clone()) for n, t in model.state_dict(keep_vars=True).items() if "_scale" in n or "_outer" in n
    }
    calibrate(model, [x * 8 for x in batches()])
    again = prepared(name)
    for n, t in model.state_dict(keep_vars=True).items():
        if n in before:
            assert id(t) == before[n][0], "an optimizer holds it"
            assert ("input" in n) != same(t, before[n][1]), n
    calibrate(model, batches())
    for n, t in model.state_dict().items():
        assert same(t, again.state_dict()[n]), n


def test_the_iterator_can_be_empty_only_if_no_input_scale_is_asked_for() -> None:
    """Weight scales need no data: prepare has measured them, calibrate measures them again."""
    model = prepared("intx3-learned", calibrated=False)
    assert not uncalibrated(model)
    with torch.no_grad():
        model.up.weight.mul_(2)
    before = model.up.weight_scale.detach().clone()
    calibrate(model, [])
    assert torch.equal(model.up.weight_scale, before * 2)


# Errors


def test_layers_that_were_not_reached_are_named_and_nothing_changes() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = Model(), Model()

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    model = Experts()
    quantize_(model, QATConfig(INT8))
    with pytest.raises(
        ValueError, match=r"(?s)2 layer\(s\) cannot.*idle.up: the forward loop did not reach it"
    ) as error:
        calibrate(model, batches())
    assert "used" not in str(error.value)
    assert model.used.up.input_scale.isnan().all() and uncalibrated(model) == [
        "used.up",
        "used.down",
        "idle.up",
        "idle.down",
    ]


@pytest.mark.parametrize(
    ("x", "says"),
    [
        (torch.zeros(2, 64), "0: its input was zero throughout"),
        (torch.full((2, 64), float("nan")), "0: its input ranged from nan to nan"),
        (torch.full((2, 64), float("inf")), "0: its input ranged from inf to inf"),
        (torch.empty(0, 64), "0: the forward loop did not reach it"),
    ],
    ids=["zero", "nan", "inf", "empty"],
)
def test_unusable_ranges_are_named(x: Tensor, says: str) -> None:
    model = nn.Sequential(nn.Linear(64, 8))
    quantize_(model, QATConfig(INT8))
    with pytest.raises(ValueError, match=says):
        calibrate(model, [x])
    calibrate(model, [torch.ones(2, 64)])
    with pytest.raises(ValueError, match=says):
        calibrate(model, [x])
    assert float(model[0].input_scale) == pytest.approx(1 / 127.5)


@pytest.mark.parametrize(
    ("loop", "says"),
    [
        (None, "got NoneType$"),
        (3, "got int$"),
        (torch.ones(4, 64), r"got Tensor: put one batch into a list, \[batch\]$"),
        ({"x": torch.ones(4, 64)}, r"got dict: put one batch into a list, \[batch\]$"),
        ("text", "got str: put"),
    ],
    ids=["none", "number", "tensor", "dict", "string"],
)
def test_what_is_no_loop_is_refused(loop: Any, says: str) -> None:
    model = nn.Sequential(nn.Linear(64, 32))
    quantize_(model, QATConfig(Int8WeightConfig(activation="int8-tensor-static")))
    with pytest.raises(ValueError, match=f"forward_loop must be a function .* or an iterable of batches, {says}"):
        calibrate(model, loop)


def test_nothing_to_calibrate() -> None:
    model = Model()
    quantize_(model, QATConfig(Int8WeightConfig()))
    with pytest.raises(ValueError, match="nothing to calibrate: no prepared layer holds scales"):
        calibrate(model, batches())


def test_without_calibration_forward_and_convert_say_what_to_do() -> None:
    model = prepared("int8", calibrated=False)
    with pytest.raises(
        ValueError, match=r"up: static scales, or a fitted transform, have no values yet: call aoquant\.calibrate"
    ):
        model(batches(1)[0])
    with pytest.raises(ValueError, match=r"up \(96, 64\): static scales, or a fitted transform, have no values yet"):
        quantize_(model, QATConfig(step="convert"))
    set_fake_quant(model, False)
    assert torch.equal(model(batches(1)[0]), Model()(batches(1)[0]))


def test_ptq_with_a_static_config_says_how_to_observe_first() -> None:
    model = Model()
    with pytest.raises(
        ValueError,
        match=r"(?s)2 layer\(s\) cannot.*calibration finds: quantize_\(model, QATConfig\(config, step='prepare'\)\)",
    ):
        quantize_(model, INT8)
    assert type(model.up) is nn.Linear


def test_observe_then_convert_is_ptq_with_static_scales() -> None:
    """No training in between; the result is the float weights' dynamic codes, with a constant activation scale."""
    model = prepared("int8")
    quantize_(model, QATConfig(step="convert"))
    plain = Model()
    quantize_(plain, Int8WeightConfig())
    assert torch.equal(model.up.weight.qdata, plain.up.weight.qdata)
    assert torch.equal(model.up.weight.scale, plain.up.weight.scale)
    assert re.fullmatch(r"int8-tensor-static:[\d.e-]+", model.up.weight.activation)


@pytest.mark.parametrize("name", ["int8", "intx3-learned"])
def test_layers_that_share_a_weight_cannot_hold_scales(name: str) -> None:
    config, options = CONFIGS[name]
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].weight = model[0].weight
    with pytest.raises(ValueError, match="0: its weight is tied, and layers that share a weight cannot hold scales"):
        quantize_(model, QATConfig(config, **options))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Int8WeightConfig(activation="int8-row-static"), "one scale for the whole tensor"),
        (lambda: Int8WeightConfig(activation="mxfp8-static"), "one scale for the whole tensor"),
        (lambda: QATConfig(INT8, scales="fixed"), "scales is one of dynamic, static, learned"),
    ],
    ids=["row", "block", "unknown"],
)
def test_configs_that_cannot_be(make: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


def test_scales_that_cannot_be_learned_name_the_layer_and_leave_the_model() -> None:
    model = Model()
    with pytest.raises(ValueError, match=r"up \(96, 64\): learned scales are for integers"):
        quantize_(model, QATConfig(NVFP4WeightConfig(), scales="learned"))
    assert type(model.up) is nn.Linear


def test_a_failed_convert_leaves_the_held_scales() -> None:
    model = prepared("int8-learned")
    want = model(batches(1)[0])
    keys = list(model.state_dict())
    pack = PackedTensor.from_encoded
    outcomes = iter([pack])

    def once(*args: Any) -> Any:
        return next(outcomes)(*args)  # the second layer fails

    with mock.patch.object(PackedTensor, "from_encoded", once), pytest.raises(StopIteration):
        quantize_(model, QATConfig(step="convert"))
    assert list(model.state_dict()) == keys and torch.equal(model(batches(1)[0]), want)


# Where the scales live


@pytest.mark.parametrize("shape", [(4, 48), (4, 0), ()], ids=str)
@pytest.mark.parametrize("config", [INT8, NVFP4WeightConfig(transform=WUSH(16))], ids=["static", "wush"])
def test_an_input_of_a_wrong_width_is_named(config: Any, shape: tuple[int, ...]) -> None:
    model = Model()
    quantize_(model, QATConfig(config))
    with pytest.raises(
        ValueError, match=rf"^up: the layer's input needs K = 64 values .* got shape {re.escape(str(shape))}"
    ):
        calibrate(model, [batches(1)[0], torch.randn(shape)])
    assert uncalibrated(model) == ["up", "down"]
    calibrate(model, batches(1))
    assert model(batches(1)[0]).isfinite().all()


def test_a_range_too_small_for_a_scale_is_named() -> None:
    model = Model(torch.float16)
    quantize_(model, QATConfig(FP8WeightConfig("e5m2", activation="fp8-e5m2-tensor-static")))
    with pytest.raises(ValueError, match=r"up: its input ranged from .* too little for a scale in float16"):
        calibrate(model, [torch.full((2, 5, 64), 9e-4, dtype=torch.float16)])
    assert uncalibrated(model) == ["up", "down"]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_diverged_scale_does_not_convert(value: float) -> None:
    model = prepared("intx3-learned")
    with torch.no_grad():
        model.up.weight_scale[2] = value
    with pytest.raises(ValueError, match=r"up .*a scale that it holds is NaN or Inf"):
        quantize_(model, QATConfig(step="convert"))
