"""Transforms: the Hadamard transform against its dense matrix, the formats behind it, and layers that train through it."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
import torch
from linear_cases import ALL, BF16, F16, F32, Case, assert_equal, converted, data, dtype_name, layer, prepared
from torch import Tensor, nn
from torchao.core.config import config_from_dict, config_to_dict

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
from aoquant.formats import MX, NVFP4, HighPrecision, Transformed
from aoquant.linear import LinearRecipe
from aoquant.ops import Request
from aoquant.report.measure import sqnr
from aoquant.transforms import WUSH, parse

SIZES = (16, 32, 64, 128)
MASKS = {16: 0xA5C3, 32: 0x9E3779B9, 64: 0x9E3779B97F4A7C15, 128: (1 << 127) | 0xBEEF}
sizes = pytest.mark.parametrize("size", SIZES)


def sylvester(size: int) -> Tensor:
    """H by its recursion, float64."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < size:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return h


def dense(t: Hadamard) -> Tensor:
    """T = h H diag(s), of bf16 numbers, in float64."""
    h = torch.tensor(1 / math.sqrt(t.size), dtype=torch.bfloat16).double()
    signs = torch.tensor([-1.0 if t.signs >> i & 1 else 1.0 for i in range(t.size)], dtype=torch.float64)
    return h * sylvester(t.size) * signs


def blocks(x: Tensor, matrix: Tensor) -> Tensor:
    """Blocks of x times `matrix`, in float64."""
    return (x.double().reshape(-1, matrix.shape[0]) @ matrix).view(x.shape)


def each(transform: Hadamard) -> list[Hadamard]:
    return [transform, Hadamard(transform.size, MASKS[transform.size])]


# The transform


@sizes
def test_hadamard_is_its_dense_matrix(size: int) -> None:
    """Exactly on integers, where float32 sums are exact; within float32's rounding on everything else."""
    for t in each(Hadamard(size)):
        forward, back = dense(t).t(), torch.linalg.inv(dense(t))
        integers = torch.randint(-64, 64, (7, 3 * size)).float()
        for inverse, matrix in ((False, forward), (True, back)):
            scale = torch.tensor(t.factor(inverse)).double()  # float32's
            exact = (blocks(integers, matrix) / abs(matrix[0, 0])).round() * scale
            assert torch.equal(t.apply(integers, inverse).double(), exact.float().double())
            x = torch.randn(7, 3 * size)
            for got, want in (
                (t.apply(x, inverse), blocks(x, matrix)),
                (t.pull_back(x, inverse), blocks(x, matrix.t())),
            ):
                assert got.dtype == torch.float32
                bound = 2.0**-23 * math.log2(size) * x.abs().view(7, 3, size).sum(-1, keepdim=True).expand(7, 3, size)
                assert ((got.double() - want).abs() <= bound.reshape(7, -1)).all()


@sizes
def test_the_two_sides_leave_the_product_alone(size: int) -> None:
    """T has bf16 entries: its own inverse is the weight side, and T on both sides would be off by twice 1.1e-4 for 32 and 128."""
    t = Hadamard(size, MASKS[size])
    x, w = torch.randn(4, 2 * size), torch.randn(5, 2 * size)
    y = x.double() @ w.double().t()
    inverse = t.apply(x, False).double() @ t.apply(w, True).double().t()
    assert (inverse - y).norm() / y.norm() < 3e-7
    rounded = t.apply(x, False).double() @ t.apply(w, False).double().t()
    gain = float((rounded * y).sum() / (y * y).sum()) - 1
    assert t.sided == (size in (32, 128))
    assert gain == pytest.approx(-2.13e-4 if t.sided else 0, abs=2e-6)
    once = float(t.apply(torch.eye(size), False).double().square().mean() * size) ** 0.5 - 1
    assert once == pytest.approx(-1.07e-4 if t.sided else 0, abs=2e-6)


def test_all_ones_become_four_and_outliers_spread() -> None:
    t = Hadamard(16)
    y = t.apply(torch.ones(1, 16), False)
    assert y[0, 0] == 4 and not y[0, 1:].any()
    x = torch.randn(1, 16)
    x[0, 5] = 176
    assert x.abs().max() == 176
    assert t.apply(x, False).abs().max() < 50


def test_signs_matter_before_the_mixing_and_not_after() -> None:
    plain, signed = Hadamard(32), Hadamard(32, MASKS[32])
    x = torch.randn(64, 64).add_(1)
    fmt = get_format("mxfp4")
    a, b = (fmt.encode(t.apply(x, False)) for t in (plain, signed))
    assert not torch.equal(a.codes & 0x77, b.codes & 0x77)
    signs = torch.where(torch.arange(64) % 3 == 0, -1.0, 1.0)
    after = fmt.encode(plain.apply(x, False) * signs)
    assert torch.equal(a.codes & 0x77, after.codes & 0x77) and torch.equal(
        a.scale.view(torch.uint8), after.scale.view(torch.uint8)
    )


@sizes
def test_rows_are_independent_and_strides_do_not_matter(size: int) -> None:
    t = Hadamard(size, MASKS[size])
    x = torch.randn(9, 2 * size)
    y = t.apply(x, False)
    assert torch.equal(t.apply(x[3:4], False), y[3:4])
    assert torch.equal(t.apply(x.t().contiguous().t(), False), y)
    assert t.apply(x[:0], False).shape == (0, 2 * size)


def test_nan_and_inf_are_seen() -> None:
    x = torch.randn(2, 32)
    x[0, 3], x[1, 20] = torch.nan, torch.inf
    f = get_format("hadamard16+nvfp4-none")
    values = f.decode(f.encode(x), F32)
    assert values[0, :16].isnan().all() and values[1, 16:].isnan().all()
    assert values[0, 16:].isfinite().all() and values[1, :16].isfinite().all()


@pytest.mark.parametrize("size", [0, 8, 24, 256, True, "16", 16.5])
def test_sizes_that_are_refused(size: Any) -> None:
    for make in (Hadamard, WUSH):
        with pytest.raises(ValueError, match="size must be one of 16, 32, 64, 128"):
            make(size)


@pytest.mark.parametrize("signs", [-1, 1 << 16, 0.5, True, "ff"])
def test_signs_that_are_refused(signs: Any) -> None:
    with pytest.raises(ValueError, match="a mask of 16 bits"):
        Hadamard(16, signs)


# Names and formats


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("hadamard16+nvfp4", Transformed(NVFP4(), Hadamard(16))),
        ("hadamard32+mxfp4", Transformed(MX(), Hadamard(32))),
        ("hadamard32-inverse+mxfp4", Transformed(MX(), Hadamard(32), inverse=True)),
        ("hadamard16-sa5c3+nvfp4-static:0.5", Transformed(NVFP4("static", 0.5), Hadamard(16, 0xA5C3))),
        ("hadamard128-s1-inverse+nvfp4-static:1e+20", Transformed(NVFP4("static", 1e20), Hadamard(128, 1), inverse=True)),
        ("hadamard16+high-precision", Transformed(HighPrecision(), Hadamard(16))),
        ("wush16+nvfp4", Transformed(NVFP4(), WUSH(16))),
    ],
)  # fmt: skip
def test_names_round_trip(name: str, want: Transformed) -> None:
    assert get_format(name) == want
    assert want.name == name


@pytest.mark.parametrize(
    "name",
    [
        "hadamard16-inverse+nvfp4",
        "hadamard24+nvfp4",
        "hadamard16-s0+nvfp4",
        "hadamard16+hadamard16+nvfp4",
        "wush16-s1+nvfp4",
        "hadamard16+",
        "hadamard16",
        "hadamard16+nvfp5",
        "hadamard016+nvfp4",
    ],
)
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(ValueError, match="format"):
        get_format(name)


def test_signs_that_are_too_many_for_the_size() -> None:
    with pytest.raises(ValueError, match="mask of 16 bits"):
        get_format("hadamard16-s10000+nvfp4")


def test_parse_leaves_other_names_alone() -> None:
    assert parse("nvfp4") is None and parse("hadamard") is None
    assert get_format("nvfp4-static:1e+20") == NVFP4("static", 1e20)  # a plus, and no transform


@sizes
@pytest.mark.parametrize(
    "inner", ["mxfp4", "nvfp4", "mxfp8", "nvfp4-static:0.01", "int4-g32", "fp8-row", "int8-tensor"]
)
@pytest.mark.parametrize("dtype", ALL, ids=dtype_name)
def test_encode_quantises_the_float32_transform(size: int, inner: str, dtype: torch.dtype) -> None:
    name = f"hadamard{size}-s{MASKS[size]:x}"
    f, base = get_format(f"{name}+{inner}"), get_format(inner)
    x = data("mixed", 6, 2 * size, dtype)
    y = f.transform.apply(x, False)
    got, want = f.encode(x), base.encode(y)
    for a, b in zip(got[:4], want[:4], strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert_equal(a, b)
    assert torch.equal(f.saturated(x, got), base.saturated(y, want))
    assert_equal(f.decode(got, dtype), base.decode(want, dtype))
    assert_equal(f.operand(got, dtype), base.operand(want, dtype))
    assert f.bits_per_weight(6, 2 * size) == base.bits_per_weight(6, 2 * size) or inner.startswith("int4")


def test_rounding_the_transform_to_bf16_first_is_another_quantiser() -> None:
    """Measured: .8 to 1.1 % of the codes."""
    x = torch.randn(512, 1024).to(BF16)
    for name in ("hadamard16+nvfp4", "hadamard32+mxfp4"):
        f = get_format(name)
        ours, other = f.encode(x), f.base.encode(f.transform.apply(x, False).to(BF16))
        a, b = (torch.cat((e.codes & 15, e.codes >> 4)) for e in (ours, other))
        assert 0.006 < float((a != b).double().mean()) < 0.013


def test_the_scale_is_found_after_the_transform() -> None:
    """All-ones: 1 before, 4 after. A scale of the untransformed values would clip it, or waste two bits."""
    f = get_format("hadamard16+nvfp4")
    e = f.encode(torch.ones(1, 16))
    assert float(f.measure(torch.ones(1, 16)).outer) == pytest.approx(4 / 2688)
    assert f.decode(e, F32)[0, 0] == pytest.approx(4, rel=1e-6)
    assert torch.equal(f.fake_quantize(torch.ones(1, 16)).round(decimals=5), torch.ones(1, 16))


@sizes
@pytest.mark.parametrize("inner", ["nvfp4", "mxfp4", "int4-g128", "intx4-g64"])
def test_transform_and_quantiser_may_have_different_groups(size: int, inner: str) -> None:
    f = get_format(f"hadamard{size}+{inner}")
    assert f.block == max(size, f.inner.block)
    assert f.why_not(f.block, BF16) is None
    assert f.why_not(f.block + 8, BF16) is not None
    x = torch.randn(64, 512)
    assert sqnr(x, f.fake_quantize(x)) > 14


def test_groups_that_do_not_divide_each_other() -> None:
    assert "one must divide the other" in (get_format("hadamard32+int4-g48").why_not(96, BF16) or "")
    with pytest.raises(ValueError, match="hadamard64 needs K to be a multiple of 64, got K = 96"):
        quantize_(nn.Sequential(nn.Linear(96, 8)), NVFP4WeightConfig(transform=Hadamard(64)))


def test_an_outlier_costs_a_row_less_behind_it() -> None:
    """One scale a row: the outlier takes all codes but two for itself, unless it is spread first."""
    x, w = torch.randn(256, 512), torch.randn(64, 512)
    x[:, 7] = 60
    w[:, 7] = 0.01
    plain, behind = (get_format(name).fake_quantize(x) for name in ("intx4-row", "hadamard64+intx4-row"))
    assert sqnr(x @ w.t(), behind @ w.t()) > sqnr(x @ w.t(), plain @ w.t()) + 6


# Recipes and configs


def test_recipes_put_both_sides_behind_one_transform() -> None:
    t = Hadamard(32)
    recipe = LinearRecipe(MX(), MX(), transform=t)
    assert recipe.fprop_input == Transformed(MX(), t) and recipe.fprop_weight == Transformed(MX(), t, inverse=True)
    assert LinearRecipe(recipe.fprop_input, MX()) == recipe == LinearRecipe(Transformed(MX(), t, inverse=True), MX())
    assert LinearRecipe(None, MX(), transform=t).fprop_input == Transformed(HighPrecision(), t)
    assert recipe.deployed == recipe
    with pytest.raises(ValueError, match="one transform stands before both operands"):
        LinearRecipe(Transformed(MX(), Hadamard(16)), MX(), transform=t)
    with pytest.raises(ValueError, match="the contract dequantize"):
        LinearRecipe(MX(), MX(), "dequantize", transform=t)


def test_configs_keep_the_transform_as_json() -> None:
    for config in (
        NVFP4WeightConfig(transform=Hadamard(64, MASKS[64])),
        MXFP4WeightConfig(transform=WUSH(32)),
        NVFP4WeightConfig(),
    ):
        text = json.dumps(config_to_dict(config))
        assert config_from_dict(json.loads(text)) == config
    with pytest.raises(ValueError, match=r"transform must be aoquant.Hadamard\(size\)"):
        NVFP4WeightConfig(transform=16)  # type: ignore[arg-type]


def test_embeddings_are_refused() -> None:
    model = nn.Sequential(nn.Embedding(32, 64))
    for config in (
        NVFP4WeightConfig(activation=None, transform=Hadamard(16)),
        NVFP4WeightConfig(transform=Hadamard(16)),
    ):
        with pytest.raises(ValueError, match="the config transforms the weight"):
            quantize_(model, config, lambda m, n: isinstance(m, nn.Embedding))
    linear = nn.Sequential(nn.Linear(64, 32))
    quantize_(linear, NVFP4WeightConfig(transform=Hadamard(16)))
    with pytest.raises(ValueError, match="cannot be read behind a transform"):
        nn.functional.embedding(torch.tensor([1]), linear[0].weight)


# Layers


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
    x_q = x_t if isinstance(recipe.fprop_input.base, HighPrecision) else recipe.fprop_input.base.fake_quantize(x_t)
    w_q = recipe.fprop_weight.base.fake_quantize(blocks(linear.weight.detach(), torch.linalg.inv(dense(t))).float())
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
        t for t in saved if t.is_floating_point() and t.element_size() > 1 and t is not qat.weight and t.numel() > 1
    ]
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
        if isinstance(packed.recipe.fprop_input.base, HighPrecision):
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
