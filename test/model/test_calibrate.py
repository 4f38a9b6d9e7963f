"""Calibration: what the forward loop finds, and what it refuses. Static and learned scales afterwards:
test_held_layers.py.
"""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest
import torch
from support.bits import same_bytes
from support.held_cases import CONFIGS, EACH, INT8, Model, batches, prepared
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


def test_batches_of_every_kind_and_the_dtype_of_autocast() -> None:
    """Tuples, dicts, a generator; the range is that of what is quantised."""
    a, b = prepared("int8", calibrated=False), prepared("int8")
    one, two, three = batches()
    calibrate(a, (batch for batch in (one, (two,), {"x": three})))
    assert torch.equal(a.up.input_scale, b.up.input_scale)
    model, x = nn.Sequential(nn.Linear(32, 16)), torch.full((2, 32), 1.001)
    quantize_(model, QATConfig(INT8))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        calibrate(model, [x])
    assert torch.equal(model[0].input_scale, get_format("int8-tensor").measure(x.bfloat16()).scale.float())


@pytest.mark.parametrize("batch", [[1, 2, 3], "text", 5, {"x": 1.0}, ()])
def test_a_batch_without_a_tensor_is_refused_and_writes_no_scales(batch: Any) -> None:
    model = prepared("int8", calibrated=False)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    with pytest.raises(ValueError, match="holds no tensor"):
        calibrate(model, [batches()[0], batch])
    assert all(same_bytes(t, before[n]) for n, t in model.state_dict().items()) and uncalibrated(model)


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
            assert ("input" in n) != same_bytes(t, before[n][1]), n
    calibrate(model, batches())
    for n, t in model.state_dict().items():
        assert same_bytes(t, again.state_dict()[n]), n


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
    with pytest.raises(ValueError, match=r"(?s)idle.up: .*idle.down: ") as error:
        calibrate(model, batches())
    assert "used" not in str(error.value) and model.used.up.input_scale.isnan().all()
    assert uncalibrated(model) == ["used.up", "used.down", "idle.up", "idle.down"]


def test_a_fitted_transform_takes_one_row_and_names_a_layer_without_any() -> None:
    layers = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    quantize_(layers, QATConfig(NVFP4WeightConfig(transform=WUSH(16))))
    with pytest.raises(ValueError, match=r"(?s)1: the forward loop did not reach it") as error:
        calibrate(layers, lambda model: model[0](torch.randn(4, 32)))
    assert "0: " not in str(error.value) and uncalibrated(layers) == ["0", "1"]
    calibrate(layers, [torch.randn(1, 32)])
    assert not uncalibrated(layers)


RANGES = {
    "zero": torch.zeros(2, 64),
    "nan": torch.full((2, 64), float("nan")),
    "inf": torch.full((2, 64), float("inf")),
    "empty": torch.empty(0, 64),
    "too small": torch.full((2, 64), 9e-4),  # for a scale in float16
}


@pytest.mark.parametrize("x", RANGES.values(), ids=RANGES)
def test_unusable_ranges_are_named(x: Tensor) -> None:
    config = FP8WeightConfig("e5m2", activation="fp8-e5m2-tensor-static") if x is RANGES["too small"] else INT8
    model = nn.Sequential(nn.Linear(64, 8, dtype=torch.float16))
    quantize_(model, QATConfig(config))
    with pytest.raises(ValueError, match="0: "):
        calibrate(model, [x.half()])
    assert uncalibrated(model) == ["0"]
    calibrate(model, [torch.ones(2, 64).half()])
    before = model[0].input_scale.clone()
    with pytest.raises(ValueError, match="0: "):
        calibrate(model, [x.half()])
    assert torch.equal(model[0].input_scale, before)


def dynamic() -> nn.Module:
    model = Model()
    quantize_(model, QATConfig("int8-weight"))
    return model


def int8() -> Model:
    return prepared("int8", calibrated=False)


REFUSED: dict[str, tuple[Any, str]] = {
    "no loop": (lambda: calibrate(int8(), None), "forward_loop .*NoneType"),
    "a number": (lambda: calibrate(int8(), 3), "forward_loop .*int"),
    "a tensor": (lambda: calibrate(int8(), torch.ones(4, 64)), "forward_loop .*Tensor"),
    "a dict": (lambda: calibrate(int8(), {"x": torch.ones(4, 64)}), "forward_loop .*dict"),
    "a string": (lambda: calibrate(int8(), "text"), "forward_loop .*str"),
    "nothing": (lambda: calibrate(dynamic(), batches()), "nothing to calibrate"),
    "row": (lambda: Int8WeightConfig(activation="int8-row-static"), "one scale for the whole tensor"),
    "block": (lambda: Int8WeightConfig(activation="mxfp8-static"), "one scale for the whole tensor"),
    "scales": (lambda: QATConfig(INT8, scales="fixed"), "scales"),
    "learned": (lambda: quantize_(Model(), QATConfig(NVFP4WeightConfig(), scales="learned")), r"up \(96, 64\)"),
    "ptq": (lambda: quantize_(Model(), INT8), r"up \(96, 64\).*step='prepare'"),
}


@pytest.mark.parametrize(("call", "name"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_calibrated_is_refused_by_name(call: Any, name: str) -> None:
    with pytest.raises(ValueError, match=rf"(?s){name}"):
        call()


def test_without_calibration_forward_and_convert_say_what_to_do() -> None:
    model = prepared("int8", calibrated=False)
    with pytest.raises(ValueError, match=r"up: .*aoquant\.calibrate"):
        model(batches(1)[0])
    with pytest.raises(ValueError, match=r"up \(96, 64\)"):
        quantize_(model, QATConfig(step="convert"))
    set_fake_quant(model, False)
    assert torch.equal(model(batches(1)[0]), Model()(batches(1)[0]))


@pytest.mark.parametrize("name", ["int8", "intx3-learned"])
def test_layers_that_share_a_weight_cannot_hold_scales(name: str) -> None:
    config, options = CONFIGS[name]
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].weight = model[0].weight
    with pytest.raises(ValueError, match="0: its weight is tied"):
        quantize_(model, QATConfig(config, **options))


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
    with pytest.raises(ValueError, match=rf"^up: .*{re.escape(str(shape))}"):
        calibrate(model, [batches(1)[0], torch.randn(shape)])
    assert uncalibrated(model) == ["up", "down"]
    calibrate(model, batches(1))
    assert model(batches(1)[0]).isfinite().all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_diverged_scale_does_not_convert(value: float) -> None:
    model = prepared("intx3-learned")
    with torch.no_grad():
        model.up.weight_scale[2] = value
    with pytest.raises(ValueError, match=r"up .*NaN or Inf"):
        quantize_(model, QATConfig(step="convert"))
