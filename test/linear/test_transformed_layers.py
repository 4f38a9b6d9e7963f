"""Layers behind a Hadamard transform: outputs and gradients against dense matrices, conversion, slices, compilation."""

from __future__ import annotations

import copy

import pytest
import torch
from support.linear_cases import BF16, F16, F32, Case, assert_equal, converted, data, dtype_name, layer, prepared
from support.transform_cases import MASKS, blocks, dense
from torch import nn

from aoquant import (
    Hadamard,
    MXFP4WeightConfig,
    NVFP4WeightConfig,
    PackedTensor,
    PackedWeightConfig,
    QATConfig,
    calibrate,
    explain,
    quantize_,
)
from aoquant.formats import HighPrecision
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


def test_explain_names_the_transform_and_the_gemm_behind_it() -> None:
    qat = prepared(CASES[0], layer(CASES[0], BF16))
    assert "hadamard16" in str(explain(qat)) and "reference" in str(explain(converted(CASES[0], qat)))
