"""Transforms: the Hadamard transform against its dense matrix, the formats behind it, and layers that train through
it.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from support.bits import unequal_parts
from support.linear_cases import ALL, BF16, F32, assert_equal, data, dtype_name
from support.transform_cases import MASKS, SIZES, blocks, dense
from torch import nn
from torchao.core.config import config_from_dict, config_to_dict

from aoquant import (
    Hadamard,
    MXFP4WeightConfig,
    NVFP4WeightConfig,
    get_format,
    quantize_,
)
from aoquant.formats import MX, NVFP4, HighPrecision, Operand, get_operand
from aoquant.linear.recipe import LinearRecipe
from aoquant.report.measure import sqnr
from aoquant.transforms import WUSH, Rotation, parse

sizes = pytest.mark.parametrize("size", SIZES)


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
    """T has bf16 entries: its own inverse is the weight side, and T on both sides would be off by twice 1.1e-4 for 32
    and 128.
    """
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
        ("hadamard16+nvfp4", Operand(NVFP4(), Hadamard(16))),
        ("hadamard32+mxfp4", Operand(MX(), Hadamard(32))),
        ("hadamard32-inverse+mxfp4", Operand(MX(), Hadamard(32), inverse=True)),
        ("hadamard16-sa5c3+nvfp4-static:0.5", Operand(NVFP4("static", 0.5), Hadamard(16, 0xA5C3))),
        ("hadamard128-s1-inverse+nvfp4-static:1e+20", Operand(NVFP4("static", 1e20), Hadamard(128, 1), inverse=True)),
        ("hadamard16+high-precision", Operand(HighPrecision(), Hadamard(16))),
        ("wush16+nvfp4", Operand(NVFP4(), WUSH(16))),
    ],
)  # fmt: skip
def test_names_round_trip(name: str, want: Operand) -> None:
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
    "inner",
    ["mxfp4", "nvfp4", "mxfp8", "nvfp4-static:0.01", "int4-g32", "fp8-row", "int8-tensor", "fouroversix", "gridflip"],
)
@pytest.mark.parametrize("dtype", ALL, ids=dtype_name)
def test_encode_quantises_the_float32_transform(size: int, inner: str, dtype: torch.dtype) -> None:
    name = f"hadamard{size}-s{MASKS[size]:x}"
    f, base = get_format(f"{name}+{inner}"), get_format(inner)
    x = data("mixed", 6, 2 * size, dtype)
    y = f.transform.apply(x, False)
    got, want = f.encode(x), base.encode(y)
    assert not unequal_parts(got, want)
    assert torch.equal(f.saturated(x, got), base.saturated(y, want))
    assert_equal(f.decode(got, dtype), base.decode(want, dtype))
    assert_equal(f.operand(got, dtype), base.operand(want, dtype))
    assert f.bits_per_weight(6, 2 * size) == base.bits_per_weight(6, 2 * size) or inner.startswith("int4")


@pytest.mark.parametrize("name", ["hadamard32+xx-mxfp4", "hadamard16+xx-nvfp4", "hadamard16+xx-nvfp4-static:0.1"])
def test_values_rounded_to_bf16_before_fp4_are_another_result(name: str) -> None:
    """As docs/fp4.md says: QuantLinear's torch backend rounds the transform to bf16, its kernels and aoquant do not."""
    f = get_format(name)
    x = torch.randn(1024, 1024).bfloat16()
    y = f.transform.apply(x, False)
    ours = f.format.decode(f.encode(x), F32)
    theirs = f.format.fake_quantize(y.bfloat16().float())
    assert 28 < sqnr(ours, theirs) < 34.5
    assert 18 < sqnr(y, ours) < 21  # FP4's own error


@sizes
@pytest.mark.parametrize("inner", ["nvfp4", "mxfp4", "int4-g128", "intx4-g64"])
def test_transform_and_quantiser_may_have_different_groups(size: int, inner: str) -> None:
    f = get_format(f"hadamard{size}+{inner}")
    assert f.block == max(size, f.format.block)
    assert f.why_not(f.block, BF16) is None
    assert f.why_not(f.block + 8, BF16) is not None
    x = torch.randn(64, 512)
    assert sqnr(x, f.fake_quantize(x)) > 14


def test_groups_that_do_not_divide_each_other() -> None:
    assert "one must divide the other" in (get_format("hadamard32+int4-g48").why_not(96, BF16) or "")
    with pytest.raises(ValueError, match="hadamard64 needs K to be a multiple of 64, got K = 96"):
        quantize_(nn.Sequential(nn.Linear(96, 8)), NVFP4WeightConfig(transform=Hadamard(64)))


# Recipes and configs


def test_recipes_put_both_sides_behind_one_transform() -> None:
    t = Hadamard(32)
    recipe = LinearRecipe(MX(), MX(), transform=t)
    assert recipe.fprop_input == Operand(MX(), t) and recipe.fprop_weight == Operand(MX(), t, inverse=True)
    assert LinearRecipe(recipe.fprop_input, MX()) == recipe == LinearRecipe(Operand(MX(), t, inverse=True), MX())
    assert LinearRecipe(None, MX(), transform=t).fprop_input == Operand(HighPrecision(), t)
    assert recipe.deployed == recipe
    with pytest.raises(ValueError, match="one transform stands before both operands"):
        LinearRecipe(Operand(MX(), Hadamard(16)), MX(), transform=t)
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
    with pytest.raises(ValueError, match=r"transform takes aoquant.Hadamard\(size\)"):
        NVFP4WeightConfig(transform=16)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "config",
    [
        NVFP4WeightConfig(activation=None, transform=Hadamard(16)),
        NVFP4WeightConfig(transform=Hadamard(16)),
        NVFP4WeightConfig(activation=None, transform=WUSH(16)),
    ],
    ids=["weight", "both", "fitted"],
)
def test_embeddings_are_refused(config: NVFP4WeightConfig) -> None:
    with pytest.raises(ValueError, match="the config transforms the weight"):
        quantize_(nn.Sequential(nn.Embedding(32, 64)), config, lambda m, n: isinstance(m, nn.Embedding))
    if config.transform == Hadamard(16):
        linear = nn.Sequential(nn.Linear(64, 32))
        quantize_(linear, config)
        with pytest.raises(ValueError, match="cannot be read behind a transform"):
            nn.functional.embedding(torch.tensor([1]), linear[0].weight)


def test_what_an_operand_says_of_its_transform() -> None:
    plain, behind, fitted = (get_operand(name) for name in ("nvfp4", "hadamard16+nvfp4", "wush16+nvfp4"))
    assert [o.portable for o in (plain, behind, fitted)] == [
        True,
        True,
        False,
    ]  # WUSH's matrices are fitted on a device
    assert not get_operand("hadamard16+intx4-g32-hqq").portable
    assert [o.matrix_bytes(64) for o in (plain, behind, fitted)] == [0, 0, 2 * 16 * 64]
    assert plain.bits_per_weight(4, 64) == behind.bits_per_weight(4, 64) == NVFP4().bits_per_weight(4, 64)
    assert fitted.bits_per_weight(4, 64) == NVFP4().bits_per_weight(4, 64) + 8 * 2 * 16 * 64 / (4 * 64)
    grad = torch.randn(2, 64)
    assert plain.pull_back(grad) is grad and behind.pull_back(grad).shape == grad.shape
    assert not Operand(NVFP4(), inverse=True).inverse and not Operand(NVFP4(), Hadamard(16), inverse=True).inverse
    assert Operand(NVFP4(), Hadamard(32), inverse=True).inverse


def test_a_transform_that_is_drawn_is_not_deployed() -> None:
    with pytest.raises(ValueError, match="rotates at random, and a deployed layer does not"):
        LinearRecipe(MX(), MX(), transform=Rotation(32))
