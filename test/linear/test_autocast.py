"""Autocast: x and the output follow it, the weight is encoded from the dtype it is stored in, and prepared still equals
converted.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.linear_cases import (
    AOQUANT_CASES,
    BF16,
    BY_NAME,
    F16,
    F32,
    INT4,
    Case,
    assert_equal,
    autocast,
    converted,
    data,
    dtype_name,
    layer,
    like_another,
    prepared,
)
from torch import nn
from torchao.prototype.mx_formats import NVFP4DynamicActivationNVFP4WeightConfig

from aoquant import PackedWeightConfig, QATConfig, get_format, list_formats, quantize_
from aoquant.linear.tensor import same_bits

PAIRS = [(F32, BF16), (F32, F16), (BF16, F16), (BF16, BF16)]


def often(case: Case) -> list[tuple[torch.dtype, torch.dtype]]:
    """Pairs that are run in every commit's tests: two dtypes, and one; of a case that is like another, the first."""
    return [(F32, BF16)] if like_another(case) else [(F32, BF16), (BF16, BF16)]


NAMED = [(pair, f"{dtype_name(pair[0])}-in-{dtype_name(pair[1])}") for pair in PAIRS]
pairs = pytest.mark.parametrize(("stored", "cast"), [pytest.param(*pair, id=name) for pair, name in NAMED])
cases = pytest.mark.parametrize(
    ("case", "stored", "cast"),
    [
        pytest.param(c, *pair, id=f"{c}-{name}", marks=[pytest.mark.slow] if pair not in often(c) else [])
        for c in AOQUANT_CASES
        for pair, name in NAMED
    ],
)


@cases
def test_prepared_equals_converted(case: Case, stored: torch.dtype, cast: torch.dtype) -> None:
    """Convert encodes the weight from its stored dtype: a weight cast to bf16 first has other codes."""
    for bias in (True, False):
        qat = prepared(case, layer(case, stored, bias=bias))
        packed = converted(case, qat)
        for x_dtype in (stored, cast):
            x = data("mixed", 6, case.k, x_dtype, 1).clamp(-10, 10).view(2, 3, case.k)
            with autocast(cast):
                y, z, of_cast = qat(x), packed(x), qat(x.to(cast))
            assert y.dtype == cast
            assert_equal(y, z)
            assert_equal(y, of_cast)  # nothing else of the input is read


def test_a_float32_weight_has_other_codes_than_its_bf16_cast() -> None:
    """So a prepared layer that encoded the cast weight would differ from the converted one above."""
    case = BY_NAME["int4-g32"]
    w, f = data("normal", case.n, case.k, F32), case.config.weight_format()
    assert not torch.equal(f.encode(w).codes, f.encode(w.bfloat16()).codes)


@pairs
@pytest.mark.parametrize("name", ["int4-g32", "nvfp4-act", "fp8-row-act", "int8-row-asymact", "mxfp4-act"])
def test_gradients_have_their_parameters_dtype(name: str, stored: torch.dtype, cast: torch.dtype) -> None:
    """dx and dW are computed in autocast's dtype from the values that forward used, db is summed in float32."""
    case = BY_NAME[name]
    qat = prepared(case, layer(case, stored))
    x = data("normal", 6, case.k, stored, 1).requires_grad_()
    g = data("normal", 6, case.n, cast, 2)
    with autocast(cast):
        y = qat(x)
    y.backward(g)
    recipe = qat.prepared.recipe
    w_hat = recipe.fprop_weight.decode(recipe.fprop_weight.encode(qat.weight.detach()), cast)
    x_hat = x.detach().to(cast)
    if recipe.fprop_input:
        x_hat = recipe.fprop_input.fake_quantize(x_hat)
    assert_equal(x.grad, (g @ w_hat).to(stored), "dx")
    assert_equal(qat.weight.grad, (g.t() @ x_hat).to(stored), "dW")
    assert_equal(qat.bias.grad, g.float().sum(0).to(stored), "db")


def test_autocast_off_inside_is_off() -> None:
    case = BY_NAME["nvfp4-act"]
    qat = prepared(case, layer(case, F32))
    x = data("normal", 6, case.k, F32, 1)
    with autocast(BF16), torch.autocast("cpu", enabled=False):
        inside = qat(x)
    assert_equal(inside, qat(x))


def test_int4_kernel_layer_in_float32_runs_under_bf16_autocast() -> None:
    """The MSLK kernel takes bf16 activations: a float32 layer has them under autocast, and says so otherwise."""
    qat = prepared(INT4, layer(INT4, F32))
    x: Any = data("normal", 6, INT4.k, F32, 1)
    with autocast(BF16):
        y = qat(x)
    assert_equal(y, qat(x.bfloat16()))
    with pytest.raises(ValueError, match="bfloat16"):
        qat(x)


def test_float16_is_refused_where_unscaled_sums_would_overflow() -> None:
    layer = nn.Sequential(nn.Linear(64, 32, dtype=torch.bfloat16))
    quantize_(layer, QATConfig(NVFP4DynamicActivationNVFP4WeightConfig(use_triton_kernel=False)))
    with torch.autocast("cpu", torch.float16), pytest.raises(ValueError, match="float16 overflows there"):
        layer(torch.randn(4, 64))


@pytest.mark.parametrize("name", [n for n in list_formats() if not get_format(n).draws])
def test_quantising_inside_autocast_gives_the_same_bytes(name: str) -> None:
    for dtype, region in (
        (torch.bfloat16, torch.float16),
        (torch.float16, torch.bfloat16),
        (torch.float32, torch.float16),
    ):
        torch.manual_seed(0)
        outside = nn.Sequential(nn.Linear(256, 48)).to(dtype)
        inside = copy.deepcopy(outside)
        quantize_(outside, PackedWeightConfig(name))
        with torch.autocast("cpu", dtype=region):
            quantize_(inside, PackedWeightConfig(name))
        assert same_bits(inside[0].weight, outside[0].weight)
