"""Training: gradients equal a reference written out here, and it learns.

The reference is straight through: the layer computed y = x^ W^T + b, so dx = dy W^, dW = dy^T x^ and db = sum dy, as if
x^ and W^ were the operands and rounding were the identity. Nothing flows through a scale.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from support.linear_cases import (
    AOQUANT_CASES,
    BF16,
    BY_NAME,
    F16,
    F32,
    FP8_BLOCKS,
    TORCHAO_CASES,
    Case,
    assert_equal,
    converted,
    data,
    dtype_name,
    layer,
    prepared,
    torchao_quantize_,
    with_kinds,
)
from support.training_cases import assert_same, step, steps
from torch import Tensor, nn
from torch.nn import functional as F
from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, PerTensor
from torchao.quantization.qat import QATConfig as TorchaoQATConfig

from aoquant import (
    QATConfig,
    quantize_,
    set_fake_quant,
)
from aoquant.formats import Format

ALL_CASES = (*TORCHAO_CASES, *AOQUANT_CASES, FP8_BLOCKS)
ONE_OF_EACH = (
    "int4-g32",
    "intx4-int8act",
    "int8-row-act",
    "fp8-row-act",
    "fp8-tensor-act",
    "mxfp8-act",
    "mxfp4-act",
    "nvfp4-act",
)
one_of_each = pytest.mark.parametrize("name", ONE_OF_EACH)


def decoded(fmt: Format | None, x: Tensor, dtype: torch.dtype) -> Tensor:
    """What the GEMM multiplied, per value."""
    return x.to(dtype) if fmt is None else fmt.decode(fmt.encode(x), dtype)


def reference(qat: nn.Linear, x: Tensor, g: Tensor) -> dict[str, Tensor]:
    """Gradients by hand: two matrix products and a sum, in dy's dtype; pulled back through a transform (dense:
    test_transforms.py).
    """
    recipe = qat.prepared.recipe
    x_MK, g_MN = x.detach().reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
    w_hat = decoded(recipe.fprop_weight, qat.weight.detach(), g.dtype)
    x_hat = decoded(recipe.fprop_input, x_MK, g.dtype)
    back = recipe.fprop_input.pull_back if recipe.fprop_input else (lambda dx: dx)
    return {
        "x": back(g_MN @ w_hat).reshape(x.shape),
        "weight": recipe.fprop_weight.pull_back(g_MN.t() @ x_hat),
        "bias": g_MN.float().sum(0).to(g.dtype),
    }


def cosine(a: Tensor, b: Tensor) -> float:
    return float(F.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0))


# Gradients


@pytest.mark.parametrize(("case", "dtype", "kind"), with_kinds(ALL_CASES, ("normal", "mixed")))
def test_gradients_equal_the_reference(case: Case, dtype: torch.dtype, kind: str) -> None:
    """Bit for bit, on 2-D, 3-D and strided inputs, empty batches, and with strided gradients."""
    qat = prepared(case, layer(case, dtype, kind=kind))
    rows = data(kind, 6, case.k, dtype, 1) / (64 if dtype == F16 else 1)
    g = data("normal", 6, case.n, dtype, 2)
    xs = {"2d": rows, "3d": rows.view(2, 3, -1), "1d": rows[0], "empty": rows[:0], "strided": rows.t().contiguous().t()}
    for shape, x in xs.items():
        upstream = g[: x.numel() // case.k].reshape(*x.shape[:-1], case.n)
        if shape == "strided":
            upstream = upstream.t().contiguous().t()
        got, want = step(qat, x, upstream), reference(qat, x, upstream)
        for part in want:
            assert_equal(got[part], want[part], f"{shape}, d{part}")


@pytest.mark.parametrize("dtype", [BF16, F32], ids=dtype_name)
@one_of_each
def test_reference_is_the_derivative_of_the_forward(name: str, dtype: torch.dtype) -> None:
    """The reference itself against PyTorch's autograd through F.linear of the decoded operands, in float64."""
    case = BY_NAME[name]
    qat = prepared(case, layer(case, dtype))
    x, g = data("normal", 6, case.k, dtype, 1), data("normal", 6, case.n, dtype, 2)
    recipe = qat.prepared.recipe
    w_hat = decoded(recipe.fprop_weight, qat.weight.detach(), F32).double().requires_grad_()
    x_hat = decoded(recipe.fprop_input, x, F32).double().requires_grad_()
    bias = qat.bias.detach().double().requires_grad_()
    y = F.linear(x_hat, w_hat, bias)
    y.backward(g.double())
    torch.testing.assert_close(
        qat(x).double(), y, rtol=2e-2 if dtype == BF16 else 1e-5, atol=2e-2 if dtype == BF16 else 1e-4
    )
    got = step(qat, x, g)
    for part, want in (("x", x_hat.grad), ("weight", w_hat.grad), ("bias", bias.grad)):
        assert cosine(got[part], want) > (0.9999 if dtype == BF16 else 1 - 1e-9), part


@pytest.mark.parametrize("granularity", [PerRow(), PerTensor()], ids=["row", "tensor"])
def test_torchao_fp8_does_not_train_and_ours_does(granularity: Any) -> None:
    """Its autograd casts the gradient to fp8 inside dequantise; the same config here keeps the direction."""
    base = Float8DynamicActivationFloat8WeightConfig(granularity=granularity)
    linear = nn.Linear(256, 128, dtype=BF16)
    x, g = data("normal", 64, 256, BF16, 1), data("normal", 64, 128, BF16, 2) * 1e-3
    want = step(linear, x, g)["weight"]
    theirs, ours = (nn.ModuleDict({"linear": copy.deepcopy(linear)}) for _ in range(2))
    torchao_quantize_(theirs, TorchaoQATConfig(base, step="prepare"))
    quantize_(ours, QATConfig(base))
    assert abs(cosine(step(theirs["linear"], x, g)["weight"], want)) < 0.1
    assert cosine(step(ours["linear"], x, g)["weight"], want) >= 0.99


@one_of_each
def test_packed_layers_pass_the_input_gradient(name: str) -> None:
    """Converted layers under something that still trains, LoRA say: dx and db as before, and no gradient for codes."""
    case = BY_NAME[name]
    qat = prepared(case, layer(case, BF16))
    packed = converted(case, qat)
    x, g = data("normal", 6, case.k, BF16, 1), data("normal", 6, case.n, BF16, 2)
    got, want = step(packed, x, g), step(qat, x, g)
    assert set(got) == {"y", "x", "bias"} and not packed.weight.requires_grad
    for part, g in got.items():
        assert_equal(g, want[part], part)


# Options


CLIPS = ("intx4-g32", "mxfp4-floor", "nvfp4-static-act")  # something in each weight


@pytest.mark.parametrize(
    "name",
    [
        *CLIPS,
        "int8-row-act",
        "ao.mxfp4-floor",
        "fp8-row-act",
        "fp8-1x32-act",
        "ao.stretched3-axis",
        "ao.fp8act-fp8-row-ub",
    ],
)
def test_clipped_straight_through_zeroes_what_the_largest_code_clips(name: str) -> None:
    """By hand: the mask is where the value lies beyond half a step above the largest code, found from the decoded
    values.
    """
    case = BY_NAME[name]
    linear = layer(case, BF16, n=64)
    plain, clipped = prepared(case, linear), prepared(case, linear, straight_through="clipped")
    x, g = data("normal", 32, case.k, BF16, 1), data("normal", 32, 64, BF16, 2)
    assert_equal(plain(x), clipped(x))
    got, want = step(clipped, x, g), step(plain, x, g)
    recipe = clipped.prepared.recipe
    for part, fmt, value in (("weight", recipe.fprop_weight, linear.weight.detach()), ("x", recipe.fprop_input, x)):
        mask = torch.zeros(value.shape, dtype=torch.bool) if fmt is None else fmt.saturated(value, fmt.encode(value))
        assert_equal(got[part], want[part].masked_fill(mask, 0), part)
        assert mask.any() or part == "x" or name not in CLIPS
        if fmt is not None:  # what is clipped moves inwards: the decoded value is nearer to zero
            hat = decoded(fmt, value, F32)
            assert (hat.abs()[mask] < value.float().abs()[mask]).all()
    assert_equal(got["bias"], want["bias"])


@one_of_each
def test_fake_quant_switch_per_module(name: str) -> None:
    case = BY_NAME[name]
    linear = layer(case, BF16)
    model = nn.ModuleDict({"a": copy.deepcopy(linear), "b": copy.deepcopy(linear)})
    quantize_(model, QATConfig(case.config))
    x, g = data("normal", 6, case.k, BF16, 1), data("normal", 6, case.n, BF16, 2)
    quantised = model["b"](x)
    model["a"].fake_quant = False
    assert_equal(model["a"](x), linear(x))
    assert_same(step(model["a"], x, g), step(linear, x, g))
    assert_equal(model["b"](x), quantised)
    assert not torch.equal(quantised, linear(x))
    assert set_fake_quant(model, True) == 2
    assert_equal(model["a"](x), quantised)
    assert set_fake_quant(model, False) == 2
    assert_equal(model["b"](x), linear(x))


# The toy of spec/torchao.md: 300 AdamW steps, a student of 64-64-64 after a teacher of 64-256-64; the target's variance
# is .056. Each recipe has the share of float32's loss that it may end at. Eight bits end at 0.997 to 1.008 of it at a
# constant rate. Four bits keep hopping between codes then (1.11 to 1.39), so their rate is annealed: measured 1.033,
# 1.032, 1.103 and 1.154, where rounding float32's solution gives 1.056, 1.056, 1.162 and 1.241.
EIGHT_BITS = {"int8": 1.05, "fp8": 1.05, "fp8-tensor/fp8-tensor": 1.05, "mxfp8": 1.05}
FOUR_BITS = {"nvfp4": 1.15, "int4-g32": 1.05, "int4-g32/int8-row": 1.05, "mxfp4": 1.2}


def toy(config: Any, *, anneal: bool) -> tuple[float, nn.Module, Tensor, Tensor]:
    """Final loss, the student, inputs and targets."""
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    x = torch.randn(512, 64)
    with torch.no_grad():
        target = teacher(x)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    if config is not None:
        quantize_(model, QATConfig(config))
    steps(model, torch.optim.AdamW(model.parameters(), lr=3e-3), x, target, 300, anneal=anneal)
    with torch.no_grad():
        return float(F.mse_loss(model(x), target)), model, x, target


@cache
def float32_toy(anneal: bool) -> tuple[float, nn.Module, Tensor, Tensor]:
    return toy(None, anneal=anneal)


def test_toy_is_the_specifications() -> None:
    """float32 ends at .0071. torchao's fp8 ends at .038 to .066: it does not learn."""
    assert float32_toy(anneal=False)[0] == pytest.approx(0.0071, abs=0.0002)


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(r, marks=[] if r in ("int8", "nvfp4") else [pytest.mark.slow]) for r in EIGHT_BITS | FOUR_BITS],
)
def test_toy_learns(recipe: str) -> None:
    """Training in four bits recovers at least a quarter of what rounding costs; converted is what was trained."""
    anneal = recipe in FOUR_BITS
    trained, model, x, target = toy(recipe, anneal=anneal)
    float32, plain, *_ = float32_toy(anneal)
    assert trained <= (EIGHT_BITS | FOUR_BITS)[recipe] * float32, f"{trained / float32:.3f} of float32's loss"
    if anneal:
        quantize_(rounded := copy.deepcopy(plain), recipe)
        with torch.no_grad():
            afterwards = float(F.mse_loss(rounded(x), target))
        assert trained - float32 < 0.75 * (afterwards - float32), f"rounded {afterwards / float32:.3f}"
    y = model(x)
    quantize_(model, QATConfig(step="convert"))
    assert_equal(model(x), y)
