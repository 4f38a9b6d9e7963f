"""Layers that hold static or learned scales: saved, cast, trained, resumed and converted with the numbers that
calibration found.
"""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from support.bits import same_bytes
from support.held_cases import CONFIGS, EACH, INT8, LEARNED, QUICK, Model, adam, batches, layers, prepared, train
from support.meters import saved
from support.training_cases import steps
from torch import distributed, nn
from torch.nn import functional as F
from torchao.quantization import FqnToConfig, PerGroup
from torchao.quantization.qat import IntxFakeQuantizeConfig

from aoquant import (
    Int8WeightConfig,
    IntxWeightConfig,
    QATConfig,
    calibrate,
    quantize_,
    set_fake_quant,
    verify,
)
from aoquant.calibrate import uncalibrated


@EACH
def test_the_state_dict_holds_them(name: str) -> None:
    config, options = CONFIGS[name]
    plain, model = Model(), prepared(name)
    extra = [k for k in model.state_dict() if k not in plain.state_dict()]
    static = "static" in str(getattr(config, "activation", None))
    assert any("input_" in k for k in extra) == static
    assert any("weight_" in k for k in extra) == (options.get("scales", "dynamic") != "dynamic")
    learned = {n for n, _ in model.named_parameters()} - {n for n, _ in plain.named_parameters()}
    assert learned == ({k for k in extra if k.endswith("_scale")} if options.get("scales") == "learned" else set())


def test_dynamic_recipes_add_no_key() -> None:
    model = Model()
    quantize_(model, QATConfig(Int8WeightConfig(activation="int8-row")))
    assert list(model.state_dict()) == list(Model().state_dict())


@EACH
def test_casts_move_the_layer_and_leave_the_numbers(name: str) -> None:
    """`.to(dtype)`, `.half()`, `.float()`: a rounded scale would be another scale. A device moves them."""
    model = prepared(name)
    before = {k: v.clone() for k, v in model.state_dict().items() if k not in Model().state_dict()}
    identities = {k: id(v) for k, v in model.named_parameters()}
    for cast in (lambda m: m.to(torch.float16), lambda m: m.float(), lambda m: m.to("cpu", torch.bfloat16)):
        cast(model)
        assert all(same_bytes(model.state_dict()[k], v) for k, v in before.items())
    assert {k: id(v) for k, v in model.named_parameters()} == identities
    assert all(t.is_meta for t in copy.deepcopy(model).to("meta").state_dict().values())


def test_a_cast_in_the_middle_of_accumulation() -> None:
    model = prepared("int8-learned")
    for _ in range(2):
        model(batches(1)[0]).float().square().mean().backward()
        model.to(torch.float16).to(torch.bfloat16)
    assert model.up.input_scale.grad.dtype == torch.float32 and model.up.weight.grad.dtype == torch.bfloat16
    adam(model).step()


@pytest.mark.parametrize("name", ["int8", "int8-asym", "fp8", "nvfp4"])
def test_nan_in_the_input_is_seen_in_the_output(name: str) -> None:
    """Integer codes have no NaN, and a constant scale would hide it: prepared and converted show it all the same."""
    model, x = prepared(name), batches(1)[0]
    x[0, 0, 3] = float("nan")
    assert model(x)[0, 0].isnan().all()
    quantize_(model, QATConfig(step="convert"))
    assert model(x)[0, 0].isnan().all()


@EACH
def test_convert_takes_the_scales_as_they_are(name: str) -> None:
    """Set to numbers that nothing would measure; they come out in the name of the activation and in the packed
    weight.
    """
    model = prepared(name)
    recipe = model.up.prepared.recipe
    for k, v in model.named_buffers():
        if v.dtype == torch.float32 and "outer" not in k and "zero" not in k:
            v.mul_(1.2345)
    with torch.no_grad():
        for k, v in model.named_parameters():
            if k.endswith("_scale"):
                v.mul_(1.2345)
    want, x_scales, w_scales = model(batches(1)[0]), model.up.held_scales("input"), model.up.held_scales("weight")
    quantize_(model, QATConfig(step="convert"))
    assert torch.equal(model(batches(1)[0]), want)
    assert list(model.state_dict()) == list(Model().state_dict())
    packed = model.up.weight
    if x_scales is not None:
        numbers = packed.activation.partition("-static:")[2].split(":")
        assert [float(n) for n in numbers] == [t.item() for t in x_scales if t is not None]
    if w_scales is not None and recipe.fprop_weight.name.startswith("int8"):
        assert torch.equal(packed.scale, w_scales.scale)
    if w_scales is not None and w_scales.outer is not None:
        held = w_scales.outer / torch.tensor(1536.0) if "gridflip" in name else w_scales.outer  # it holds the absmax
        assert (packed.per_tensor_scale == held).all()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [  # the quick ones in bf16
        pytest.param(
            n, d, marks=[] if n in QUICK and d == torch.bfloat16 else [pytest.mark.slow], id=f"{n}-{str(d)[6:]}"
        )
        for n in CONFIGS
        for d in (torch.bfloat16, torch.float32)
    ],
)
def test_prepared_equals_converted_after_training(name: str, dtype: torch.dtype) -> None:
    """2-D, 3-D, one row, no row, and values far beyond the calibrated range; the report says inf, and finds the weights
    equal.
    """
    model = prepared(name, dtype)
    train(model, adam(model), 1, dtype)
    deployed = copy.deepcopy(model)
    quantize_(deployed, QATConfig(CONFIGS[name][0], step="convert"))
    x = batches(1, dtype)[0]
    for shape in (x, x[0], x[0, :1], x[:, :0], x * 100):
        y = model(shape)
        assert y.isfinite().all() and torch.equal(deployed(shape), y)
    found = verify(model, deployed, x)
    assert found.min_sqnr == float("inf") and all(r.weight_sqnr_db == float("inf") for r in found.layers)


def test_static_costs_no_more_memory_than_dynamic() -> None:
    """Bytes saved for backward, and bytes of the packed weights: a NaN shows in the scale of its row, so rows have
    one.
    """

    def costs(activation: str) -> tuple[int, int]:
        model = nn.Sequential(Model().up)
        quantize_(model, QATConfig(Int8WeightConfig(activation=activation)))
        if uncalibrated(model):
            calibrate(model, batches())
        kept = saved(model, model, batches(1)[0].requires_grad_() * 1)
        quantize_(model, QATConfig(step="convert"))
        w = model[0].weight
        return kept, sum(t.numel() * t.element_size() for t in (w.qdata, w.scale))

    assert costs("int8-tensor-static") == costs("int8-row")


@pytest.mark.parametrize("name", LEARNED)
def test_learned_scales_move(name: str) -> None:
    model = prepared(name)
    before = {n: p.detach().clone() for n, p in model.named_parameters() if n.endswith("_scale")}
    train(model, adam(model), 2)
    assert before and all(not torch.equal(model.get_parameter(n), v) for n, v in before.items())


def test_a_float_checkpoint_brings_no_scales() -> None:
    """Weights without their scales: what was measured on other weights does not apply, and the next forward says so."""
    model = prepared("int8-learned")
    assert model.load_state_dict(Model().state_dict(), strict=False).missing_keys
    with pytest.raises(ValueError, match="up: static scales, or a fitted transform, have no values yet"):
        model(batches(1)[0])
    calibrate(model, batches())
    assert torch.equal(model.up.input_scale, prepared("int8-learned").up.input_scale)


def test_the_switch_and_unprepare() -> None:
    model, x = prepared("int8-learned"), batches(1)[0]
    set_fake_quant(model, False)
    assert torch.equal(model(x), Model()(x))
    for layer in layers(model).values():
        layer.unprepare()
    assert list(model.state_dict()) == list(Model().state_dict()) and torch.equal(model(x), Model()(x))


@pytest.mark.slow
def test_learned_scales_beat_the_measured_ones_on_outliers() -> None:
    """Three bits, a weight with one large value a group: absmax wastes the codes, and LSQ finds that clipping costs
    less.
    """

    def loss(scales: str) -> float:
        torch.manual_seed(0)
        teacher, x = nn.Linear(64, 64), torch.randn(128, 64)
        with torch.no_grad():
            teacher.weight[:, ::32] *= 8
            target = teacher(x)
        model = nn.Sequential(copy.deepcopy(teacher))
        quantize_(model, QATConfig(IntxWeightConfig(3, 32), scales=scales))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
        steps(model, optimizer, x, target, 60, anneal=True)
        with torch.no_grad():
            return float(F.mse_loss(model(x), target))

    assert loss("learned") < 0.9 * loss("static")


# torchao's words


@pytest.mark.parametrize(
    ("range_learning", "scales"), [(False, "static"), (True, "learned")], ids=["static", "learned"]
)
def test_torchaos_range_learning_config(range_learning: bool, scales: str) -> None:
    """Resumes into a fresh model, which torchao's cannot: its scales are made in the first forward."""
    weight = IntxFakeQuantizeConfig(torch.int4, PerGroup(32), is_dynamic=False, range_learning=range_learning)
    config = QATConfig(weight_config=weight)
    model, fresh = Model(), Model()
    quantize_(model, config)
    assert (
        model.up.prepared.recipe.weight_scales == scales
        and isinstance(model.up.weight_scale, nn.Parameter) == range_learning
    )
    train(model, adam(model), 3)
    quantize_(fresh, config)
    fresh.load_state_dict(model.state_dict())
    x = batches(1)[0]
    want = model(x)
    assert torch.equal(fresh(x), want)
    quantize_(fresh, QATConfig(step="convert"))
    assert torch.equal(fresh(x), want)


def test_torchaos_static_activation_per_token_is_refused() -> None:
    config = IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False, is_dynamic=False)
    with pytest.raises(ValueError, match="a static scale per token fits one shape of batch"):
        quantize_(Model(), QATConfig(weight_config="int8-row", activation_config=config))


def test_fqn_to_config_mixes_static_and_dynamic() -> None:
    model = Model()
    config = FqnToConfig({"up": INT8, "down": Int8WeightConfig(activation="int8-row")})
    quantize_(model, QATConfig(config, scales="learned"))
    calibrate(model, batches())
    assert {n for n, _ in model.named_parameters()} >= {"up.input_scale", "up.weight_scale", "down.weight_scale"}
    want = model(batches(1)[0])
    quantize_(model, QATConfig(step="convert"))
    assert torch.equal(model(batches(1)[0]), want) and model.down.weight.activation == "int8-row"


# Several ranks


def test_extrema_are_reduced_over_ranks() -> None:
    """Two ranks, one of which missed a layer: every rank gets the range of both."""
    whole = prepared("int8-asym")
    one, two, three = batches()
    mine, theirs = prepared("int8-asym", calibrated=False), prepared("int8-asym", calibrated=False)
    sent: list[Any] = []

    def gather(out: list[Any], given: Any) -> None:
        sent.append(given)
        out[:] = [given, sent[0]]

    with (
        mock.patch.object(distributed, "is_initialized", return_value=True),
        mock.patch.object(distributed, "get_world_size", return_value=2),
        mock.patch.object(distributed, "all_gather_object", side_effect=gather),
    ):
        calibrate(theirs, [three, one])
        calibrate(mine, [two])
        for layer, want in zip(layers(mine).values(), layers(whole).values(), strict=True):
            assert torch.equal(layer.input_scale, want.input_scale) and torch.equal(layer.input_zero, want.input_zero)
        sent[:] = [[None, sent[0][1]]]
        calibrate(mine, [two])
    assert torch.equal(mine.down.input_scale, whole.down.input_scale)
    assert not torch.equal(mine.up.input_scale, whole.up.input_scale)
