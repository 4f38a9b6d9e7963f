"""Scales that are held: encoding under them is encoding, constants are names, and a learned scale's gradient is LSQ's.

The gradient's reference is written out here in float64 with autograd's own straight-through rounding. Where every value
is clipped, nothing is rounded: there the gradient is checked against differences of the function itself.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from support.bits import same_bytes, unequal_parts
from support.formats import ASYMMETRIC
from support.golden_inputs import data_set
from support.linear_cases import BF16, F16, F32, assert_equal, data, dtype_name
from torch import Tensor, nn

from aoquant import QATConfig, quantize_
from aoquant.formats import FLOAT_DTYPES, NVFP4, Affine, Scales, get_format, list_formats
from aoquant.linear import held
from aoquant.linear.prepared import Prepared, QATLinear
from aoquant.linear.recipe import LinearRecipe

DTYPES = [BF16, F16, F32]
KINDS = ("normal", "special")
PER_TENSOR = ["int8-tensor", "int8-tensor-asym", "intx4-tensor", "fp8-tensor", "fp8-e5m2-tensor", "nvfp4"]


def kept(s: Scales) -> Scales:
    """As a layer holds them: float32 copies."""
    return Scales(*(t if t is None else t.float() if t.dtype in FLOAT_DTYPES else t.clone() for t in s))


def affine(name: str) -> Affine:
    f = Affine(4, "tensor") if name == "intx4-tensor" else get_format(name)
    assert isinstance(f, Affine)
    return f


@pytest.mark.parametrize("dtype", [BF16, pytest.param(F16, marks=pytest.mark.slow), F32], ids=dtype_name)
@pytest.mark.parametrize("name", [*list_formats(), *ASYMMETRIC])
def test_encoding_under_the_scales_that_were_measured_is_encoding(name: str, dtype: torch.dtype) -> None:
    """Every byte, also when the scales were kept in float32 in between."""
    fmt = get_format(name)
    for kind in KINDS:
        x = data_set(kind, 8, 256, dtype)
        want = fmt.encode(x)
        for scales in (fmt.measure(x), kept(fmt.measure(x))):
            got = fmt.encode(x, scales)
            assert not unequal_parts(got, want), kind


@pytest.mark.parametrize("name", PER_TENSOR)
def test_a_constant_is_part_of_the_name_exactly(name: str) -> None:
    """Forty float32 scales through the name and back; the constant format encodes as the dynamic one under that
    scale.
    """
    fmt = affine(name) if name == "intx4-tensor" else get_format(name)
    zero = (-3,) if getattr(fmt, "mapping", "") == "asymmetric" else ()
    x = data("normal", 4, 64, BF16)
    for scale in torch.rand(40, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 3, 40):
        fixed = fmt.fix(scale.item(), *zero)
        assert "-static:" in fixed.name
        if name != "intx4-tensor":  # no standard format of that name to find the constants in
            assert get_format(fixed.name) == fixed
        e, pair = fixed.encode(x), scale.view(1, 1)
        zeros = torch.tensor([[-3]], dtype=torch.int8) if zero else None
        want = fmt.encode(x, Scales(outer=pair) if isinstance(fmt, NVFP4) else Scales(pair, zeros))
        assert same_bytes(e.codes, want.codes) and same_bytes(fixed.decode(e, BF16), fmt.decode(want, BF16))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("int8-row-static:0.1", "for each row or block"),
        ("mxfp4-static:0.1", "for each row or block"),
        ("int4-g32-static:0.1", "for each row or block"),
        ("nvfp4-none-static:0.1", "for each row or block"),
        ("int8-tensor-static:0.1:3", "a positive finite scale, got"),
        ("int8-tensor-asym-static:0.1", "an int8 zero point"),
        ("int8-tensor-asym-static:0.1:200", "an int8 zero point"),
        ("int8-tensor-static:0.0", "positive finite scale"),
        ("fp8-tensor-static:-1.0", "positive finite scale"),
        ("fp8-tensor-static:inf", "positive finite scale"),
        ("fp8-tensor-static:nan", "positive finite scale"),
        ("nvfp4-static:nan", "positive finite scale"),
        ("int8-tensor-static:", "after '-static:'"),
        ("int8-tensor-static:x", "after '-static:'"),
        ("int8-tensor-static:0.1:0.5", "after '-static:'"),
        ("int8-tensor-static:1e-1", "one name, this one 'int8-tensor-static:0.1'"),
        ("int8-tensor-static:0.1-static:0.1", "for each row or block|after '-static:'"),
    ],
)
def test_what_is_no_constant_is_refused(name: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        get_format(name)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize(
    "name", ["int8-tensor", "int8-tensor-asym", "fp8-tensor", "nvfp4", "int4-g32", "mxfp4", "intx4-g32"]
)
def test_beyond_the_range_saturates_and_nan_stays_visible(name: str, dtype: torch.dtype) -> None:
    """Under the scales of a tensor without outliers: what is 100 times larger becomes the largest value, NaN stays
    NaN.
    """
    fmt = get_format(name)
    usual = data("normal", 2, 64, dtype)
    scales = kept(fmt.measure(usual))
    wild = usual.clone()
    wild[0, 5] *= 100
    got = fmt.decode(fmt.encode(wild, scales), F32)
    assert got.isfinite().all()
    largest = fmt.decode(fmt.encode(torch.full_like(usual, usual.abs().max().item()).copysign(wild), scales), F32).abs()
    if name not in ("nvfp4", "int4-g32"):  # NVFP4's block scale follows; int4's range is not symmetric
        assert got[0, 5].abs() == largest[0, 5]
    bad = usual.clone()
    bad[1, 3] = float("nan")
    assert fmt.decode(fmt.encode(bad, scales), F32)[1, 3].isnan()


def test_per_tensor_constants_take_empty_batches() -> None:
    for name in (
        "int8-tensor-static:0.1",
        "int8-tensor-asym-static:0.1:3",
        "fp8-tensor-static:0.1",
        "nvfp4-static:0.1",
    ):
        e = get_format(name).encode(torch.empty(0, 32, dtype=BF16))
        assert e.codes.shape[0] == 0


# The gradient of a learned scale


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad


def lsq(fmt: Affine, x_RK: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """Compute Esser et al. 2020 with autograd, in float64: clamp(round(x / s) + zp) - zp, times s."""
    low, high = fmt.limits
    groups = x_RK.reshape(1, 1, -1) if fmt.per == "tensor" else x_RK.view(x_RK.shape[0], -1, fmt.group or x_RK.shape[1])
    zp = 0 if zero is None else zero.double().unsqueeze(-1)
    s = scale.unsqueeze(-1)
    code = _Round.apply(groups / s + zp)
    # Written out: at exactly `low` and `high` the gradient of torch's clamp is 1 until torch 2.13 and 0 from 2.14 on.
    clipped = torch.where((code < low) | (code > high), code.detach().clamp(low, high), code)
    return ((clipped - zp) * s).reshape(x_RK.shape)


LEARNED = ["intx4-g32", "intx3-row", "intx4-g32-asym", "int8-row", "int8-tensor", "int8-tensor-asym", "intx2-g32"]


@pytest.mark.parametrize("name", LEARNED)
def test_scale_gradient_is_lsqs(name: str) -> None:
    """float32 against float64 written by hand, at scales .5, .93 and 1.7 times the measured ones: from much to nothing
    is clipped.
    """
    fmt = affine(name)
    x, grad = data("normal", 8, 64, F32, 1), data("normal", 8, 64, F32, 2)
    for factor in (0.5, 0.93, 1.7):  # not 1: there the largest value is a tie
        scales = fmt.measure(x)
        assert scales.scale is not None
        scales = scales._replace(scale=(scales.scale * factor).float())
        scale, values = scales.scale.double().requires_grad_(), x.double().requires_grad_()
        lsq(fmt, values, scale, scales.zero).backward(grad.double())
        got = fmt.scale_gradient(x, scales, grad)
        torch.testing.assert_close(got.double(), scale.grad, rtol=1e-4, atol=1e-4)
        clipped = fmt.saturated(x, fmt.encode(x, scales))
        assert torch.equal(values.grad == 0, clipped)
        assert clipped.any() or factor > 1


@pytest.mark.parametrize("name", ["intx4-g32", "int8-tensor"])
def test_scale_gradient_of_clipped_values_is_the_slope_of_the_function(name: str) -> None:
    """All values clipped: value = code * s is smooth in s, so central differences are an oracle without any
    straight-through.
    """
    fmt = affine(name)
    x, grad = data("normal", 4, 64, F32, 1).sign() * 50, data("normal", 4, 64, F32, 2)
    scale = torch.full_like(fmt.measure(x).scale.float(), 2.0**-6)
    step = 2.0**-10

    def total(s: Tensor) -> Tensor:
        values = fmt.decode(fmt.encode(x, Scales(s)), F32) * grad
        return values.sum().view(1, 1) if fmt.per == "tensor" else values.view(4, 2, 32).sum(-1)

    slope = (total(scale + step) - total(scale - step)) / (2 * step)
    torch.testing.assert_close(fmt.scale_gradient(x, Scales(scale), grad), slope, rtol=1e-4, atol=1e-2)


def learned_layer(weight: str, activation: str, dtype: torch.dtype, n: int = 24, k: int = 64) -> QATLinear:
    torch.manual_seed(3)
    linear = nn.Linear(k, n, dtype=dtype)
    recipe = LinearRecipe(get_format(activation), get_format(weight), input_scales="learned", weight_scales="learned")
    qat = QATLinear.prepare(linear, Prepared(recipe, None, "layer"))
    held.write(qat, "input", recipe.fprop_input.measure(data("normal", 6, k, dtype, 1) * 0.61))
    qat.calibrated = True
    with torch.no_grad():
        qat.weight_scale.mul_(0.7)  # so that something is clipped on both sides
    return qat


@pytest.mark.parametrize("activation", ["int8-tensor", "int8-tensor-asym"])
@pytest.mark.parametrize("weight", ["intx4-g32", "int8-row", "intx4-row-asym"])
def test_all_gradients_of_a_learned_layer(weight: str, activation: str) -> None:
    """dx, dW, db and both scales' of a float32 layer against the whole layer written in float64."""
    qat = learned_layer(weight, activation, F32)
    x, g = data("normal", 6, 64, F32, 1).requires_grad_(), data("normal", 6, 24, F32, 2)
    qat(x).backward(g)

    leaves = {n: p.detach().double().requires_grad_() for n, p in qat.named_parameters()}
    x64 = x.detach().double().requires_grad_()
    zeros = [getattr(qat, f"{side}_zero", None) for side in ("input", "weight")]
    x_hat = lsq(affine(activation), x64, leaves["input_scale"], zeros[0])
    w_hat = lsq(affine(weight), leaves["weight"], leaves["weight_scale"], zeros[1])
    (x_hat @ w_hat.t() + leaves["bias"]).backward(g.double())

    count = {"input_scale": 64, "weight_scale": leaves["weight"].numel() // leaves["weight_scale"].numel()}
    largest = {"input_scale": 127, "weight_scale": affine(weight).limits[1]}
    for name, leaf in leaves.items():
        want = leaf.grad / math.sqrt(count[name] * largest[name]) if name in count else leaf.grad
        torch.testing.assert_close(qat.get_parameter(name).grad.double(), want, rtol=1e-4, atol=1e-4, msg=name)
    torch.testing.assert_close(x.grad.double(), x64.grad, rtol=1e-4, atol=1e-4)
    assert (qat.weight.grad == 0).any() and (x.grad == 0).any()


@pytest.mark.parametrize("dtype", [BF16, F32], ids=dtype_name)
def test_frozen_parts_of_a_learned_layer(dtype: torch.dtype) -> None:
    """Each of x, W, b and the two scales frozen in turn, and all but one: the others' gradients stay, bit for bit."""
    qat = learned_layer("intx4-g32", "int8-tensor", dtype)
    x, g = data("normal", 6, 64, dtype, 1), data("normal", 6, 24, dtype, 2)

    def gradients(wanted: set[str]) -> dict[str, Tensor | None]:
        layer, leaf = copy.deepcopy(qat), x.clone().requires_grad_("x" in wanted)
        leaves = {"x": leaf, **dict(layer.named_parameters())}
        for name, parameter in leaves.items():
            parameter.requires_grad_(name in wanted)
        layer(leaf).backward(g)
        return {name: parameter.grad for name, parameter in leaves.items()}

    names = {"x", "weight", "bias", "weight_scale", "input_scale"}
    everything = gradients(names)
    for wanted in [names - {n} for n in names] + [{n} for n in names]:
        for name, grad in gradients(wanted).items():
            assert (grad is not None) == (name in wanted), f"{name} of {wanted}"
            if grad is not None:
                assert_equal(grad, everything[name], f"{name} of {wanted}")


def test_gradients_stay_finite_where_a_scale_is_stored_as_zero() -> None:
    """float16 scales of torchao's intx: what training pushes below the smallest one is 0 there."""
    fmt = get_format("intx4-g32-sfloat16")
    assert isinstance(fmt, Affine)
    x = data("onehot", 4, 32, BF16)
    for scale in (-0.1, 0.0, 1e-9):
        scales = Scales(torch.full((4, 1), scale))
        assert fmt.decode(fmt.encode(x, scales), F32).isfinite().all()
        assert fmt.scale_gradient(x, scales, torch.ones_like(x)).isfinite().all()


def test_a_scale_below_zero_is_used_as_the_smallest_one() -> None:
    """Training may overshoot; forward and converted layer agree on what it means, and the gradient leads back up."""
    qat = learned_layer("int8-row", "int8-tensor", BF16)
    x = data("normal", 6, 64, BF16, 1)
    with torch.no_grad():
        qat.weight_scale[3] = -0.01
        qat.input_scale.fill_(-1.0)
    y = qat(x)
    assert y.isfinite().all()
    y.float().square().mean().backward()
    assert qat.weight_scale.grad.isfinite().all() and qat.input_scale.grad.isfinite().all()
    model = nn.ModuleDict({"layer": copy.deepcopy(qat)})
    model["layer"].prepared = Prepared(
        qat.prepared.recipe, QATConfig(weight_config="int8-row", activation_config="int8-tensor-static"), "layer"
    )
    quantize_(model, QATConfig(step="convert"))
    assert_equal(model["layer"](x), y)


@pytest.mark.parametrize(
    ("activation", "weight", "options", "says"),
    [
        ("int8-row", "int8-row", {"input_scales": "static"}, "one scale for the whole"),
        (None, "int8-row", {"input_scales": "static"}, "got high precision"),
        (None, "nvfp4", {"weight_scales": "learned"}, "learned scales are for integers"),
        (None, "int4-g32", {"weight_scales": "learned"}, "learned scales are for integers"),
        (None, "int8-row", {"weight_scales": "frozen"}, "weight_scales is one of"),
        (None, "int4-g32", {"straight_through": "clipped", "weight_scales": "static"}, "no clipped straight-through"),
        (None, "intx4-g32-hqq", {"weight_scales": "static"}, "HQQ fits scales and codes"),
    ],
)
def test_recipes_that_cannot_be(activation: str | None, weight: str, options: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        LinearRecipe(None if activation is None else get_format(activation), get_format(weight), **options)


@pytest.mark.parametrize("name", ["int4-tinygemm-hqq-g64", "int4-tinygemm-cpu-hqq-g64", "intx4-g64-hqq"])
def test_scales_that_hqq_fits_are_not_read_back(name: str) -> None:
    """Its codes are those of no other scales."""
    fmt, x = get_format(name), torch.randn(4, 128, dtype=BF16)
    for read in (lambda: fmt.held(fmt.encode(x)), lambda: fmt.measure(x)):
        with pytest.raises(ValueError, match=f"{name}: HQQ fits"):
            read()
