"""Without gradients inside `fixed_weights`: a prepared layer multiplies codes that were made once, as its converted
form does, with the bits that it has outside.
"""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from support.cpu_library import with_library
from support.held_cases import CONFIGS, Model
from support.linear_cases import BF16, BY_NAME, F32, Case, assert_equal, converted, data, inputs, layer, prepared
from torch import Tensor, nn
from torch.nn.utils import prune
from transformers.pytorch_utils import Conv1D

import aoquant
from aoquant import QATConfig, fixed_weights, quantize_
from aoquant.layers.bound import BoundWeight
from aoquant.layers.qat import QATLinear
from aoquant.ops import codec, router
from aoquant.recipes import get_recipe

cases = pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.slow] if c.variant else []) for c in BY_NAME.values()], ids=repr
)
cpu_library = pytest.fixture(with_library)
RECIPES = ("int4-g32", "nvfp4-act", "nvfp4-h16", "fp8-row-act", "int8-row-act", "mxfp4-act", "gridflip-act")


@pytest.fixture(params=RECIPES)
def qat(request: pytest.FixtureRequest) -> QATLinear:
    case = BY_NAME[request.param]
    return prepared(case, layer(case, BF16))


def x_of(linear: nn.Linear, rows: int = 3) -> Tensor:
    return data("normal", rows, linear.in_features, linear.weight.dtype, 1)


@cases
@torch.no_grad()
def test_bits_are_those_outside(case: Case) -> None:
    dtype = case.dtypes[0]
    linear = prepared(case, layer(case, dtype, kind="mixed"))
    given = inputs("mixed", case.k, dtype)
    want = {shape: linear(x) for shape, x in given.items()}
    with fixed_weights(linear):
        for _ in range(2):
            for shape, x in given.items():
                assert_equal(linear(x), want[shape], shape)


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_held_scales_are_read_in_each_call(name: str) -> None:
    config, options = CONFIGS[name]
    model, x = Model(), torch.randn(6, 64, dtype=BF16)
    quantize_(model, QATConfig(config, **options))
    aoquant.calibrate(model, lambda m: m(x))
    with fixed_weights(model):
        for _ in range(2):
            assert torch.equal(model(x), outside(model, x))
            for scale in (p for n, p in model.named_buffers() if n.endswith("input_scale")):
                scale.mul_(1.5)


def outside(model: nn.Module, x: Tensor) -> Tensor:
    """What a copy, which is in no block, computes."""
    y: Tensor = copy.deepcopy(model)(x)
    return y


@torch.no_grad()
def test_calls_are_those_of_the_converted_layer(qat: QATLinear) -> None:
    """Once W is encoded, the general path is not taken, and the router is not asked."""
    case = next(c for c in BY_NAME.values() if c.config == qat.prepared.config.base_config)
    x, want = x_of(qat), converted(case, qat)(x_of(qat))
    with fixed_weights(qat):
        qat(x)
        with (
            mock.patch("aoquant.layers.function.multiply", side_effect=AssertionError("the general path")),
            mock.patch.object(router, "runner", side_effect=AssertionError("the router")),
            mock.patch.object(QATLinear, "held_scales", side_effect=AssertionError("scales")),
        ):
            for given in (x, x.view(3, 1, -1)):
                assert_equal(qat(given).view(3, -1), want)


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Shapes of the matrices that are encoded."""
    shapes: list[torch.Size] = []
    for name in ("quantize",):
        real = getattr(codec, name)

        def counted(made: Any, x: Tensor, *rest: Any, real: Any = real, **options: Any) -> Any:
            shapes.append(x.shape)
            return real(made, x, *rest, **options)

        monkeypatch.setattr(codec, name, counted)
    return shapes


@torch.no_grad()
def test_a_weight_is_encoded_once(qat: QATLinear, encoded: list[torch.Size]) -> None:
    with fixed_weights(qat):
        for rows in (1, 3, 1, 7):
            qat(x_of(qat, rows))
    assert encoded.count(qat.weight.shape) == 1
    qat(x_of(qat))
    assert encoded.count(qat.weight.shape) == 2


def gradients(linear: nn.Linear, x: Tensor) -> dict[str, Tensor]:
    linear.zero_grad()
    x = x.clone().requires_grad_()
    y = linear(x)
    y.backward(torch.ones_like(y))
    return {"y": y.detach(), "x": x.grad} | {n: p.grad for n, p in linear.named_parameters()}  # type: ignore[dict-item]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("backward", ["", "mxfp8"])
def test_a_step_after_a_rollout(mode: Callable[[], Any], backward: str) -> None:
    """The codes that a rollout made are those that training multiplies and saves, and the other way round."""
    case = BY_NAME["mxfp8-act"]
    model = nn.Sequential(layer(case, BF16))
    quantize_(model, QATConfig(case.config, **({"backward": backward} if backward else {})))
    x = data("normal", 32, case.k, BF16)
    want = gradients(model[0], x)
    with fixed_weights(model):
        for _ in range(2):
            with mode():
                assert torch.equal(model(x), want["y"])
            for name, g in gradients(model[0], x).items():
                assert torch.equal(g, want[name]), name


def _in_place(linear: nn.Linear) -> None:
    with torch.no_grad():
        linear.weight.mul_(2)


def _other_data(linear: nn.Linear) -> None:
    linear.weight.data = linear.weight.data * 2


def _other_parameter(linear: nn.Linear) -> None:
    linear.weight = nn.Parameter(linear.weight.detach() * 2)


def _step(linear: nn.Linear) -> None:
    linear.weight.grad = torch.ones_like(linear.weight)
    torch.optim.SGD([linear.weight], lr=1.0, fused=True).step()


def _other_view(linear: nn.Linear) -> None:
    n, k = linear.weight.shape
    linear.weight.data = linear.weight.data.view(k, n).t()


@pytest.mark.parametrize("write", [_in_place, _other_data, _other_parameter, _step, _other_view])
def test_a_weight_that_changes_is_refused_by_name(write: Callable[[nn.Linear], None]) -> None:
    case = BY_NAME["int4-g32"]
    model = nn.ModuleDict({"linear": prepared(case, layer(case, F32))})
    linear, x = model["linear"], torch.ones(2, case.k)
    with fixed_weights(model), torch.no_grad():
        linear(x)
        write(linear)
        with pytest.raises(ValueError, match="linear: its weight, or a scale of it, changed inside"):
            linear(x)
    with fixed_weights(model), torch.no_grad():
        assert torch.equal(linear(x), outside(linear, x))


@torch.no_grad()
def test_a_step_of_a_learned_scale_is_a_write() -> None:
    case = BY_NAME["intx4-g32"]
    linear = prepared(case, layer(case, F32), scales="learned")
    x, scale = torch.ones(2, case.k), linear.get_parameter("weight_scale")
    with fixed_weights(linear):
        linear(x)
        scale.grad = torch.ones_like(scale)
        torch.optim.SGD([scale], lr=0.1, fused=True).step()
        with pytest.raises(ValueError, match="its weight, or a scale of it, changed inside"):
            linear(x)


@pytest.mark.parametrize("name", ["int8", "nvfp4"])
@torch.no_grad()
def test_the_block_frees_the_codes(name: str, cpu_library: None) -> None:
    """At once: a kernel's step that shares x's codes holds the bound weight, which holds the step."""
    model = nn.Sequential(nn.Linear(64, 32, dtype=BF16))
    quantize_(model, get_recipe(name).prepare())
    model(x := torch.ones(2, 64, dtype=BF16))  # the first forward is watched (direct_reads.py), in the general path
    gc.disable()
    try:
        with fixed_weights(model):
            model(x)
            codes = weakref.ref(model[0].fixed._rows.codes)  # type: ignore[union-attr]
            assert codes() is not None
        assert codes() is None
    finally:
        gc.enable()


@torch.no_grad()
def test_copies_are_outside_of_the_block(qat: QATLinear) -> None:
    x = x_of(qat)
    want = qat(x)
    with fixed_weights(qat):
        qat(x)
        file = io.BytesIO()
        torch.save(qat, file)
        file.seek(0)
        for copied in (copy.deepcopy(qat), torch.load(file, weights_only=False)):
            assert copied.fixed is None
            assert torch.equal(copied(x), want)
            copied.weight.mul_(2)
            copied(x)
        assert torch.equal(qat(x), want)


@torch.no_grad()
def test_other_calls_take_the_general_path() -> None:
    case = BY_NAME["int4-g32"]
    linear = prepared(case, layer(case, F32))
    x = torch.randn(3, case.k)
    with fixed_weights(linear), mock.patch.object(BoundWeight, "_multiplier", side_effect=AssertionError("bound")):
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(linear(x), outside(linear, x))
        with aoquant.backend("reference"):
            assert torch.equal(linear(x), outside(linear, x))
        with pytest.raises(ValueError, match="cast one of them"):
            linear(x.bfloat16())
        with pytest.raises(ValueError, match=f"K = {case.k}"):
            linear(x[:, 1:])


@torch.no_grad()
def test_a_pruned_bias_is_added() -> None:
    case = BY_NAME["int4-g32"]
    linear = prepared(case, layer(case, F32))
    prune.l1_unstructured(linear, "bias", amount=2)
    x = torch.randn(3, case.k)
    with fixed_weights(linear):
        linear(x)
        assert torch.equal(linear(x), outside(linear, x))


def test_conv1d(encoded: list[torch.Size]) -> None:
    """Its weight is turned round for each call, and is the same one all the same."""
    model = nn.Sequential(Conv1D(24, 64))
    quantize_(model, get_recipe("int4-g32").prepare())
    x = torch.randn(3, 64)
    want = gradients(model[0], x)
    encoded.clear()
    with fixed_weights(model):
        for _ in range(2):
            with torch.no_grad():
                assert torch.equal(model(x), want["y"])
            assert torch.equal(gradients(model[0], x)["weight"], want["weight"])
        assert encoded == [(24, 64)]
        with torch.no_grad():
            model[0].weight.mul_(2)
            with pytest.raises(ValueError, match="0: its weight, or a scale of it, changed"):
                model(x)
