"""Layers behind a Hadamard transform: outputs and gradients against dense matrices, conversion, slices, compilation."""

from __future__ import annotations

import copy

import pytest
import torch
from support.linear_cases import ALL, BF16, F16, F32, Case, assert_equal, converted, data, dtype_name, layer, prepared
from support.transform_cases import MASKS, blocks, dense
from torch import Tensor, nn

from aoquant import (
    Hadamard,
    MXFP4WeightConfig,
    NVFP4WeightConfig,
    PackedTensor,
    PackedWeightConfig,
    QATConfig,
    calibrate,
    explain,
    get_format,
    quantize_,
)
from aoquant.formats import HighPrecision
from aoquant.ops import Request
from aoquant.report.measure import sqnr

CASES = [
    Case("nvfp4-h16", NVFP4WeightConfig(transform=Hadamard(16, 0xA5C3)), 24, 256),
    Case("nvfp4-h128", NVFP4WeightConfig(transform=Hadamard(128)), 24, 256),
    Case("nvfp4-h32-weight", NVFP4WeightConfig(activation=None, transform=Hadamard(32, 77)), 24, 256),
    Case("mxfp4-h128", MXFP4WeightConfig(transform=Hadamard(128, MASKS[128])), 24, 256),
    Case("fp8-h64", PackedWeightConfig("hadamard64+fp8-row", "fp8-row"), 24, 256),
]
cases = pytest.mark.parametrize("case", CASES, ids=repr)


@cases
@pytest.mark.parametrize("dtype", ALL, ids=dtype_name)
def test_prepared_equals_converted(case: Case, dtype: torch.dtype) -> None:
    qat = prepared(case, layer(case, dtype))
    packed = converted(case, qat)
    with torch.no_grad():
        for rows in (1, 3, 64):
            x = data("normal", rows, case.k, dtype, rows)
            assert torch.equal(qat(x), packed(x))


@cases
def test_the_layer_is_the_float_layer_but_for_rounding(case: Case) -> None:
    """The output against y = Q(x T^T) Q(W T^-1)^T of dense matrices in float64; and near the unquantised one."""
    linear = layer(case, F32, bias=False)
    qat = prepared(case, linear)
    t, recipe = qat.prepared.recipe.transform, qat.prepared.recipe
    x = data("normal", 32, case.k, F32, 3)
    assert isinstance(t, Hadamard)
    x_t = blocks(x, dense(t).t()).float()
    x_q = x_t if isinstance(recipe.fprop_input.format, HighPrecision) else recipe.fprop_input.format.fake_quantize(x_t)
    w_q = recipe.fprop_weight.format.fake_quantize(blocks(linear.weight.detach(), torch.linalg.inv(dense(t))).float())
    assert sqnr(x_q.double() @ w_q.double().t(), qat(x)) > 50
    assert sqnr(linear(x), qat(x)) > 12


@cases
@pytest.mark.parametrize("straight_through", ["identity", "clipped"])
def test_gradients_against_dense_matrices(case: Case, straight_through: str) -> None:
    """dx = (dy W'^) T and dW = (dy^T x'^) T^-T, masks before the pull-back; float64 by hand."""
    qat = prepared(case, layer(case, F32), straight_through=straight_through)
    recipe, t = qat.prepared.recipe, qat.prepared.recipe.transform
    assert isinstance(t, Hadamard)
    x, g = data("normal", 16, case.k, F32, 1).requires_grad_(), data("normal", 16, case.n, F32, 2)
    qat(x).backward(g)
    e_w = recipe.fprop_weight.encode(qat.weight.detach())
    e_x = recipe.fprop_input.encode(x.detach())
    dx = g.double() @ recipe.fprop_weight.decode(e_w, F32).double()
    dw = g.double().t() @ recipe.fprop_input.decode(e_x, F32).double()
    if straight_through == "clipped":
        dx = dx.masked_fill(recipe.fprop_input.saturated(x.detach(), e_x), 0)
        dw = dw.masked_fill(recipe.fprop_weight.saturated(qat.weight.detach(), e_w), 0)
    dx, dw = blocks(dx, dense(t)), blocks(dw, torch.linalg.inv(dense(t)).t())
    for got, want in ((x.grad, dx), (qat.weight.grad, dw), (qat.bias.grad, g.double().sum(0))):
        assert (got.double() - want).norm() < 1e-6 * want.norm()


def test_clipped_masks_act_in_the_transformed_domain() -> None:
    """A static outer scale clips what is large after the transform, all-ones here, and nothing of it before."""
    config = NVFP4WeightConfig(activation="nvfp4-static:0.000744", transform=Hadamard(16))  # clips above 2.3
    case = Case("clips", config, 8, 16)
    x = torch.ones(1, 16, requires_grad=True)
    assert (
        not get_format("nvfp4-static:0.000744")
        .saturated(x.detach(), get_format("nvfp4-static:0.000744").encode(x.detach()))
        .any()
    )
    qat = prepared(case, layer(case, F32), straight_through="clipped")
    w = qat.prepared.recipe.fprop_weight
    qat(x).sum().backward()
    dx = torch.ones(1, 8) @ w.decode(w.encode(qat.weight.detach()), F32)
    saturated = qat.prepared.recipe.fprop_input.saturated(
        x.detach(), qat.prepared.recipe.fprop_input.encode(x.detach())
    )
    if not saturated[0, 0]:
        pytest.fail("the static scale should clip the first value")
    dx[0, 0] = 0
    assert torch.allclose(x.grad, Hadamard(16).pull_back(dx, False), atol=1e-6)


def test_nothing_but_codes_is_saved() -> None:
    case = CASES[0]
    qat = prepared(case, layer(case, BF16))
    x = data("normal", 64, case.k, BF16).requires_grad_()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        qat(x)
    floats = [
        t
        for t in saved
        if t.is_floating_point() and t.element_size() > 1 and t is not qat.weight and t.numel() > len(x)
    ]  # a float32 scale for each token, at most
    assert not [t for t in floats if t.data_ptr() != qat.weight.data_ptr()]


@pytest.mark.parametrize("name", ["nvfp4-static", "fp8-tensor-static", "int8-tensor-asym-static"])
def test_calibrated_scales_are_of_transformed_values(name: str) -> None:
    """A static scale calibrated on one batch is the dynamic one of it: found after the transform."""
    config = PackedWeightConfig("hadamard16+nvfp4", name)
    x = torch.ones(4, 64, dtype=BF16) + data("normal", 4, 64, BF16) / 8
    model = nn.Sequential(nn.Linear(64, 24, dtype=BF16))
    dynamic = copy.deepcopy(model)
    quantize_(model, QATConfig(config))
    quantize_(dynamic, QATConfig(PackedWeightConfig("hadamard16+nvfp4", name.removesuffix("-static"))))
    calibrate(model, [x])
    assert torch.equal(model(x), dynamic(x))
    assert not torch.equal(model(x * 0.3), dynamic(x * 0.3))
    y = model(x)
    quantize_(model, QATConfig(step="convert"))
    assert torch.equal(model(x), y)
    assert model[0].weight.activation.startswith("hadamard16+")


def test_held_weight_scales_are_of_transformed_values() -> None:
    model = nn.Sequential(nn.Linear(64, 24, dtype=BF16))
    quantize_(model, QATConfig(NVFP4WeightConfig(transform=Hadamard(16)), scales="static"))
    qat = model[0]
    outer = float(Hadamard(16).apply(qat.weight.detach(), True).abs().max()) / 2688
    assert float(qat.weight_outer) == pytest.approx(outer)
    x = data("normal", 8, 64, BF16)
    y = model(x)
    quantize_(model, QATConfig(step="convert"))
    assert torch.equal(model(x), y)


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=dtype_name)
def test_dequantize_is_what_the_layer_multiplies_by(dtype: torch.dtype) -> None:
    for case in CASES:
        qat = prepared(case, layer(case, dtype, bias=False))
        packed = converted(case, qat).weight
        assert isinstance(packed, PackedTensor)
        assert torch.equal(packed.dequantize(), qat.quantised_weight())
        assert sqnr(qat.weight, packed.dequantize()) > 15
        effective = packed.dequantize(F32)
        if isinstance(packed.recipe.fprop_input.format, HighPrecision):
            x = data("normal", 8, case.k, dtype, 9)
            assert sqnr(x.float() @ effective.t(), qat(x)) > 40


def test_slices_of_packed_weights_are_packed_slices() -> None:
    case = CASES[1]
    linear = layer(case, BF16, bias=False)
    packed = converted(case, prepared(case, linear)).weight
    assert isinstance(packed, PackedTensor)
    x = data("normal", 4, case.k, BF16)
    whole = nn.functional.linear(x, packed)
    assert torch.equal(nn.functional.linear(x, packed[8:16]), whole[:, 8:16])
    half = packed[:, 128:]
    assert half.shape == (24, 128)
    assert_equal(half.dequantize(), packed.dequantize()[:, 128:])
    with pytest.raises(ValueError, match="cut along K at multiples of 128, got 64:256"):
        packed[:, 64:]


def test_casting_a_converted_layer_does_not_touch_its_codes() -> None:
    case = CASES[1]
    packed = converted(case, prepared(case, layer(case, BF16)))
    before = packed.weight.qdata.clone(), packed.weight.format
    packed.to(F32).to(F16).to(BF16)
    assert torch.equal(packed.weight.qdata, before[0]) and packed.weight.format == before[1]


@pytest.mark.parametrize("case", [CASES[0], CASES[3]], ids=repr)
def test_compiled_equals_eager(case: Case) -> None:
    torch._dynamo.reset()
    qat = prepared(case, layer(case, BF16))
    x, g = data("normal", 16, case.k, BF16, 1), data("normal", 16, case.n, BF16, 2)
    results = []
    for run in (qat, torch.compile(qat, fullgraph=True, backend="aot_eager")):
        qat.zero_grad()
        leaf = x.clone().requires_grad_()
        y = run(leaf)
        y.backward(g)
        results.append((y, leaf.grad, qat.weight.grad.clone(), qat.bias.grad.clone()))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    torch._dynamo.reset()


def test_frozen_sides_cost_no_pull_back() -> None:
    case = CASES[0]
    qat = prepared(case, layer(case, F32))
    qat.weight.requires_grad_(False)
    x = data("normal", 4, case.k, F32).requires_grad_()
    qat(x).sum().backward()
    assert qat.weight.grad is None and x.grad is not None


def test_the_router_sees_the_formats_of_the_codes() -> None:
    """A GEMM behind a transform is the GEMM of the format behind it, and so is what `explain` and reports say."""
    cpu = torch.device("cpu")
    behind = Request(
        "aoquant", get_format("hadamard16+nvfp4"), get_format("hadamard32-inverse+nvfp4"), cpu, BF16, 4, 8, 32
    )
    plain = Request("aoquant", get_format("nvfp4"), get_format("nvfp4"), cpu, BF16, 4, 8, 32)
    assert behind == plain and explain(behind) == explain(plain)
    qat = prepared(CASES[0], layer(CASES[0], BF16))
    assert "hadamard16" in str(explain(qat)) and "reference" in str(explain(converted(CASES[0], qat)))
