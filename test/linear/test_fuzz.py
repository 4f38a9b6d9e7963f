"""Whatever is asked of a layer, in whatever order: the converted layer holds the codes that the prepared one multiplied
and computes its bits, or a ValueError says why not and nothing has changed.

An example is one or two linear layers with drawn shapes, dtypes, numbers, configs and inputs, and a drawn history:
training steps, switching off and on, copies, checkpoints, casts, autocast, and mistakes. Then convert, and more
history. 200 examples run always, 10 000 with the nightly tests. Codes and scales are taken from the prepared layer's
own GEMM call, not made again.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from support.bits import same_bytes
from support.golden_inputs import DATA
from support.linear_cases import BY_NAME, autocast, shaped
from torch import Tensor, nn
from torchao.quantization import FqnToConfig

from aoquant import (
    Int8WeightConfig,
    PackedTensor,
    PackedWeightConfig,
    QATConfig,
    list_formats,
    quantize_,
    set_fake_quant,
)
from aoquant.formats import tiles
from aoquant.linear.prepared import QATLinear
from aoquant.linear.recipe import STRAIGHT_THROUGH
from aoquant.planning.plan import plan_layer

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
GPU_ONLY = ("ao.int4-g64", "ao.nvfp4", "ao.nvfp4-none", "ao.fp8act-fp8-block")  # convert anywhere, run on a GPU
HQQ = ("intx4-g32-hqq", "intx3-row-hqq", "int4-tinygemm-hqq-g64", "int4-tinygemm-cpu-hqq-g32")
ANY = Int8WeightConfig("tensor", activation="int8-tensor")
WRONG = PackedWeightConfig("intx7-row", "int8-tensor-static:0.5")  # drawn nowhere


@dataclass(frozen=True)
class Layer:
    """A linear layer and what it is fed. numbers: names of generators, for weight and input."""

    name: str
    config: Any
    n: int
    k: int
    dtype: torch.dtype
    bias: bool
    numbers: tuple[str, str]
    shape: str
    seed: int

    def linear(self) -> nn.Linear:
        linear = nn.Linear(self.k, self.n, bias=self.bias, dtype=self.dtype)
        with torch.no_grad():
            linear.weight.copy_(numbers(self.numbers[0], self.n, self.k, self.dtype, self.seed))
        return linear

    def input(self) -> Tensor:
        """A drawn shape and strides."""
        x = numbers(self.numbers[1], 6, self.k, self.dtype, self.seed + 1)
        return shaped(x, torch.cat((x, x), 1))[self.shape]


def numbers(kind: str, rows: int, k: int, dtype: torch.dtype, seed: int) -> Tensor:
    """(rows, k) of one awkward kind."""
    if kind in DATA:
        return DATA[kind](rows, -(-k // 16) * 16, dtype, seed)[:, :k].contiguous()
    scale = {"zeros": 0.0, "tiny": 1e-30, "subnormal": torch.finfo(dtype).smallest_normal / 8, "huge": 0.0}[kind]
    x = DATA["normal"](rows, k, torch.float32, seed)
    if kind == "huge":
        scale = torch.finfo(dtype).max / 64 / max(1.0, float(x.abs().max()))
    return (x * scale).to(dtype)


KINDS = (*DATA, "zeros", "tiny", "subnormal", "huge")
SHAPES = ("1d", "2d", "3d", "empty", "transposed", "strided", "sliced", "permuted", "expanded")
PLAIN = ("1d", "2d", "3d")


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    """Half of them a case of torchao's or ours, half a pair of formats; K and N mostly what the config takes, sometimes
    not.
    """
    if draw(st.booleans()):
        case = BY_NAME[draw(st.sampled_from(sorted(BY_NAME)))]
        name, config, n, k, dtypes = case.name, case.config, case.n, case.k, case.dtypes
    else:
        activation = draw(st.one_of(st.none(), st.sampled_from(list_formats())))
        weight = draw(st.sampled_from((*list_formats(), *HQQ)))
        name, n, k, dtypes = (
            f"{weight} x {activation}",
            draw(st.integers(1, 33)),
            draw(st.sampled_from((64, 128, 256))),
            DTYPES,
        )
        try:
            config = PackedWeightConfig(weight, activation)
        except ValueError:
            config = ANY  # said at once, as it should be
    if draw(st.integers(0, 9)) == 0:
        n, k, dtypes = draw(st.integers(1, 40)), draw(st.integers(1, 140)), DTYPES
    return Layer(
        name,
        config,
        n,
        k,
        draw(st.sampled_from(dtypes)),
        draw(st.booleans()),
        (draw(st.sampled_from(KINDS)), draw(st.sampled_from(KINDS))),
        draw(st.sampled_from(SHAPES)),
        draw(st.integers(0, 1 << 20)),
    )


class Model(nn.Module):
    """Independent layers; their names are the config's keys."""

    def __init__(self, linears: list[nn.Linear]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linears)

    def run(self, xs: list[Tensor]) -> list[Tensor]:
        return [layer(x) for layer, x in zip(self.layers, xs, strict=True)]


def config_of(drawn: list[Layer]) -> Any:
    if len(drawn) == 1:
        return drawn[0].config
    return FqnToConfig({f"layers.{i}": layer.config for i, layer in enumerate(drawn)})


def refused(function: Callable[[], Any], model: Model) -> None:
    """It raises a ValueError, and the model is as it was."""
    before = [(type(m), dict(m._parameters)) for m in model.layers]
    with pytest.raises(ValueError, match=r"."):
        function()
    for (kind, parameters), m in zip(before, model.layers, strict=True):
        assert type(m) is kind
        assert all(m._parameters[name] is p for name, p in parameters.items())


def train(model: Model, xs: list[Tensor], config: Any) -> Model:
    for layer, x in zip(model.layers, xs, strict=True):
        x = x.detach().clone().requires_grad_()
        y = layer(x)
        y.backward(torch.ones_like(y))
        assert x.grad is not None and x.grad.shape == x.shape
        if not layer.weight.requires_grad:
            continue
        assert layer.weight.grad.shape == layer.weight.shape
        if layer.bias is not None:
            assert layer.bias.grad is not None
        with torch.no_grad():
            layer.weight.add_(layer.weight.grad.nan_to_num(0.0, 0.0, 0.0).sign() * 2.0**-6)
        layer.zero_grad()
    return model


def freeze(model: Model, xs: list[Tensor], config: Any) -> Model:
    """Weights train no more; their layers still pass gradients on."""
    model.requires_grad_(False)
    return model


def off_and_on(model: Model, xs: list[Tensor], config: Any) -> Model:
    set_fake_quant(model, False)
    for layer, x in zip(model.layers, xs, strict=True):
        assert same(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
    set_fake_quant(model, True)
    return model


def through_state_dict(model: Model, xs: list[Tensor], config: Any) -> Model:
    """Into a fresh copy whose weights are something else."""
    saved = io.BytesIO()
    torch.save(model.state_dict(), saved)
    saved.seek(0)
    other = copy.deepcopy(model)
    other.load_state_dict(torch.load(saved, weights_only=True), assign=True)
    return other


def prepare_twice(model: Model, xs: list[Tensor], config: Any) -> Model:
    refused(lambda: quantize_(model, QATConfig(config)), model)
    return model


def convert_wrongly(model: Model, xs: list[Tensor], config: Any) -> Model:
    refused(lambda: quantize_(model, QATConfig(WRONG, step="convert")), model)
    return model


def cast(model: Model, xs: list[Tensor], config: Any) -> Model:
    """To another dtype and back: weights are rounded, prepared layers follow."""
    dtypes = [m.weight.dtype for m in model.layers]
    model.to(torch.bfloat16)
    for m, dtype in zip(model.layers, dtypes, strict=True):
        m.to(dtype)
    return model


def convert_twice(model: Model, xs: list[Tensor], config: Any) -> Model:
    refused(lambda: quantize_(model, QATConfig(config, step="convert")), model)
    return model


def quantize_twice(model: Model, xs: list[Tensor], config: Any) -> Model:
    refused(lambda: quantize_(model, config), model)
    return model


def copied(model: Model, xs: list[Tensor], config: Any) -> Model:
    return copy.deepcopy(model).to("cpu").eval()


BEFORE = (train, freeze, off_and_on, through_state_dict, copied, prepare_twice, convert_wrongly, cast)
AFTER = (through_state_dict, copied, convert_twice, quantize_twice, prepare_twice)


def same(a: Tensor, b: Tensor) -> bool:
    """Equal in dtype, shape and every element; NaN equals NaN."""
    return a.dtype == b.dtype and a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def in_range(linear: nn.Linear, x: Tensor) -> bool:
    """Whether nothing comes near a dtype's largest number: values, their sums doubled, sums times codes, stored
    scales.
    """
    if not x.isfinite().all() or not x.numel():
        return x.numel() == 0
    w_NK, x_MK = linear.weight.detach().double().abs(), x.double().abs().reshape(-1, x.shape[-1])
    weight = linear.prepared.recipe.fprop_weight
    stored = "float16" if "tinygemm-hqq" in weight.name else getattr(weight, "stored", None)  # HQQ's iterations
    dtypes = (linear.weight.dtype, x.dtype, *([getattr(torch, stored)] if stored else []))
    narrow = min(torch.finfo(dtype).max for dtype in dtypes)
    of_codes = torch.finfo(x.dtype).max if linear.prepared.recipe.contract.startswith("int8") else 1e37
    return (
        float(w_NK.max()) < narrow / 8
        and max(float(x_MK.max()), float((x_MK @ w_NK.t()).max()) * 4) < torch.finfo(x.dtype).max / 8
        and float(x_MK.sum(-1).max()) * 448 < of_codes
        and max(float(t.sum(-1).max()) for t in (x_MK, w_NK)) * 57344 < 1e37
    )


def encodings(model: Model, xs: list[Tensor]) -> tuple[list[Tensor], list[Tensor | None]]:
    """Outputs of a prepared model, and the deployed tensor that its own codes and scales make."""
    ys, weights = [], []
    for layer, x in zip(model.layers, xs, strict=True):
        ys.append(layer(x))
        target = plan_layer(layer, QATConfig(step="convert")).target
        with torch.autocast("cpu", enabled=False):  # as an op encodes
            weights.append(target.build(layer.encode_weight(), layer.weight.detach()))
    return ys, weights


def check_stored(stored: Tensor, expected: Tensor) -> None:
    """The codes and scales that training multiplied."""
    assert type(stored) is type(expected)
    names = expected.__tensor_flatten__()[0]
    assert stored.__tensor_flatten__()[0] == names
    for name in names:
        assert same_bytes(getattr(stored, name), getattr(expected, name)), name


def comparable(drawn: Layer, weight: Tensor, x: Tensor) -> bool:
    """torchao's tensors refuse some layouts, divide zeros by zeros and treat what is not finite in ways of their
    own.
    """
    if isinstance(weight, PackedTensor):
        return True
    rows = x.reshape(-1, x.shape[-1])
    smallest = rows.float().abs().amax(-1).min() if rows.numel() else 0.0
    usual = drawn.name not in GPU_ONLY and drawn.shape in PLAIN and drawn.k > 1
    return usual and bool(x.isfinite().all()) and float(smallest) > 1e-33


@torch.no_grad()
def check_outputs(model: Model, drawn: list[Layer], xs: list[Tensor], ys: list[Tensor], cast_to: Any) -> None:
    """The bits of the prepared layer. What autocast makes of torchao's tensors is torchao's."""
    for layer, d, x, y in zip(model.layers, drawn, xs, ys, strict=True):
        if comparable(d, layer.weight.data, x) and (cast_to is None or isinstance(layer.weight, PackedTensor)):
            assert same(layer(x), y), d


def history(drawn: list[Layer], before: list[Any], after: list[Any], cast_to: Any, tile: int, **qat: str) -> None:
    """One example. cast_to: autocast's dtype, or None; tile: values that a CPU encodes at a time; qat: options of
    QATConfig.
    """
    model, xs, config = Model([d.linear() for d in drawn]), [d.input() for d in drawn], config_of(drawn)
    finite = all(bool(linear.weight.isfinite().all()) for linear in model.layers)
    with mock.patch.object(tiles, "TILE", tile), autocast(cast_to):
        try:
            quantize_(model, QATConfig(config, **qat))
        except ValueError:
            refused(lambda: quantize_(model, QATConfig(config, **qat)), model)
            return
        assert finite, "a weight that is not finite was prepared"
        try:
            model.run(xs)
        except ValueError:  # a kernel that takes no such activations
            with pytest.raises(ValueError, match=r"layers\."):
                model.run(xs)
            return
        for step in before:
            model = step(model, xs, config)
        assert all(isinstance(m, QATLinear) for m in model.layers)
        if not all(
            bool(p.isfinite().all()) for p in model.parameters()
        ):  # weights or learned scales, trained beyond float16
            refused(lambda: quantize_(model, QATConfig(step="convert")), model)
            return
        ys, weights = encodings(model, xs)
        for m, x, y, d in zip(model.layers, xs, ys, drawn, strict=True):
            assert y.shape == (*x.shape[:-1], d.n) and y.dtype == (cast_to or x.dtype)
            assert y.isfinite().all() or not in_range(m, x.to(y.dtype)), d
        quantize_(model, QATConfig(config, step="convert"))
        for m, weight in zip(model.layers, weights, strict=True):
            check_stored(m.weight.data, weight)
        check_outputs(model, drawn, xs, ys, cast_to)
        for step in after:
            model = step(model, xs, config)
            check_outputs(model, drawn, xs, ys, cast_to)


examples = {
    "drawn": st.lists(layers(), min_size=1, max_size=2),
    "before": st.lists(st.sampled_from(BEFORE), max_size=4),
    "after": st.lists(st.sampled_from(AFTER), max_size=3),
    "cast_to": st.sampled_from((None, None, torch.bfloat16, torch.float16)),
    "tile": st.sampled_from((tiles.TILE, 256)),
    "straight_through": st.sampled_from(STRAIGHT_THROUGH),
    "scales": st.sampled_from(("dynamic", "dynamic", "static", "learned")),
}
quiet = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=200, **quiet)
@given(**examples)
def test_any_history(**example: Any) -> None:
    history(**example)


@pytest.mark.nightly
@settings(max_examples=10_000, **quiet)
@given(**examples)
def test_ten_thousand_histories(**example: Any) -> None:
    history(**example)
