"""Training: gradients equal a reference written out here, frozen operands cost nothing, runs resume bit for bit, and it
learns.

The reference is straight through: the layer computed y = x^ W^T + b, so dx = dy W^, dW = dy^T x^ and db = sum dy, as if
x^ and W^ were the operands and rounding were the identity. Nothing flows through a scale.
"""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from functools import cache
from pathlib import Path
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
    counting,
    data,
    dtype_name,
    layer,
    prepared,
    torchao_quantize_,
    with_dtypes,
    with_kinds,
)
from support.training_cases import RECIPES, steps, student
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


def gradients(linear: nn.Module, x: Tensor, g: Tensor) -> dict[str, Tensor]:
    """Gradients by autograd."""
    linear.zero_grad()
    x = x.detach().requires_grad_()
    linear(x).backward(g)
    return {"x": x.grad, **{n: p.grad for n, p in linear.named_parameters() if p.grad is not None}}


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
        got, want = gradients(qat, x, upstream), reference(qat, x, upstream)
        assert set(got) == {"x", "weight", "bias"}
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
    got = gradients(qat, x, g)
    for part, want in (("x", x_hat.grad), ("weight", w_hat.grad), ("bias", bias.grad)):
        assert cosine(got[part], want) > (0.9999 if dtype == BF16 else 1 - 1e-9), part


@pytest.mark.parametrize(("case", "dtype"), with_dtypes(ALL_CASES))
def test_weight_gradient_points_where_nn_linears_does(case: Case, dtype: torch.dtype) -> None:
    """Cosine at least .99 with activations of 4 bits or more, the same gradient with none; dx is the decoded weight's.

    QuEST's scales clip: a relative MSE of .027, and so a cosine of .986.
    """
    linear = layer(case, dtype)
    qat = prepared(case, linear)
    x, g = data("normal", 32, case.k, dtype, 1), data("normal", 32, case.n, dtype, 2)
    got, want = gradients(qat, x, g), gradients(linear, x, g)
    if qat.prepared.recipe.fprop_input is None:
        assert_equal(got["weight"], want["weight"])
    quest = qat.prepared.recipe.input_name == "mxfp4-quest"
    assert cosine(got["weight"], want["weight"]) >= (0.98 if quest else 0.99)
    assert_equal(got["bias"], want["bias"])
    dequantised = copy.deepcopy(linear)
    with torch.no_grad():
        dequantised.weight.copy_(qat.quantised_weight())
    want_x = gradients(dequantised, x, g)["x"]
    if qat.prepared.recipe.transform is None:
        assert_equal(got["x"], want_x, "dx")
    else:  # the way back is after the GEMM, and rounded by itself
        assert cosine(got["x"], want_x) > (1 - 1e-5 if dtype != F32 else 1 - 1e-9)


@pytest.mark.parametrize("granularity", [PerRow(), PerTensor()], ids=["row", "tensor"])
def test_torchao_fp8_does_not_train_and_ours_does(granularity: Any) -> None:
    """Its autograd casts the gradient to fp8 inside dequantise; the same config here keeps the direction."""
    base = Float8DynamicActivationFloat8WeightConfig(granularity=granularity)
    linear = nn.Linear(256, 128, dtype=BF16)
    x, g = data("normal", 64, 256, BF16, 1), data("normal", 64, 128, BF16, 2) * 1e-3
    want = gradients(linear, x, g)["weight"]
    theirs, ours = (nn.ModuleDict({"linear": copy.deepcopy(linear)}) for _ in range(2))
    torchao_quantize_(theirs, TorchaoQATConfig(base, step="prepare"))
    quantize_(ours, QATConfig(base))
    assert abs(cosine(gradients(theirs["linear"], x, g)["weight"], want)) < 0.1
    assert cosine(gradients(ours["linear"], x, g)["weight"], want) >= 0.99


@one_of_each
def test_packed_layers_pass_the_input_gradient(name: str) -> None:
    """Converted layers under something that still trains, LoRA say: dx and db as before, and no gradient for codes."""
    case = BY_NAME[name]
    qat = prepared(case, layer(case, BF16))
    packed = converted(case, qat)
    x, g = data("normal", 6, case.k, BF16, 1), data("normal", 6, case.n, BF16, 2)
    got, want = gradients(packed, x, g), gradients(qat, x, g)
    assert set(got) == {"x", "bias"} and not packed.weight.requires_grad
    assert_equal(got["x"], want["x"])
    assert_equal(got["bias"], want["bias"])


# Options


@pytest.mark.parametrize(
    "name",
    [
        "intx4-g32",
        "int8-row-act",
        "mxfp4-floor",
        "ao.mxfp4-floor",
        "nvfp4-static-act",
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
    linear = layer(case, BF16, n=32)
    plain, clipped = prepared(case, linear), prepared(case, linear, straight_through="clipped")
    x, g = data("normal", 32, case.k, BF16, 1), data("normal", 32, 32, BF16, 2)
    assert_equal(plain(x), clipped(x))
    got, want = gradients(clipped, x, g), gradients(plain, x, g)
    recipe = clipped.prepared.recipe
    for part, fmt, value in (("weight", recipe.fprop_weight, linear.weight.detach()), ("x", recipe.fprop_input, x)):
        mask = torch.zeros(value.shape, dtype=torch.bool) if fmt is None else fmt.saturated(value, fmt.encode(value))
        assert_equal(got[part], want[part].masked_fill(mask, 0), part)
        if fmt is not None:  # what is clipped moves inwards: the decoded value is nearer to zero
            hat = decoded(fmt, value, F32)
            assert (hat.abs()[mask] < value.float().abs()[mask]).all()
    assert_equal(got["bias"], want["bias"])


@pytest.mark.parametrize("name", ["intx4-g32", "mxfp4-floor", "nvfp4-static-act", "stretched2-g32-int8act"])
def test_clipped_differs_from_identity_on_this_data(name: str) -> None:
    """The test above compares masks; here there is something to mask."""
    case = BY_NAME[name]
    clipped = prepared(case, layer(case, BF16, n=64), straight_through="clipped")
    assert (gradients(clipped, data("normal", 6, case.k, BF16, 1), torch.ones(6, 64, dtype=BF16))["weight"] == 0).any()


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
    for part, want in gradients(linear, x, g).items():
        assert_equal(gradients(model["a"], x, g)[part], want, part)
    assert_equal(model["b"](x), quantised)
    assert not torch.equal(quantised, linear(x))
    assert set_fake_quant(model, True) == 2
    assert_equal(model["a"](x), quantised)
    assert set_fake_quant(model, False) == 2
    assert_equal(model["b"](x), linear(x))


@one_of_each
def test_deepcopy_is_independent(name: str) -> None:
    case = BY_NAME[name]
    qat = prepared(case, layer(case, BF16))
    x = data("normal", 6, case.k, BF16, 1)
    want = qat(x)
    other = copy.deepcopy(qat)
    assert type(other) is type(qat) and other.prepared == qat.prepared
    assert_equal(other(x), want)
    with torch.no_grad():
        other.weight.neg_()
    other.fake_quant = False
    assert_equal(qat(x), want)
    assert qat.fake_quant
    packed = converted(case, qat)
    assert_equal(copy.deepcopy(packed)(x), want)


# requires_grad=False costs nothing


@pytest.mark.parametrize("frozen", ["x", "weight", "bias", "x weight", "x weight bias"])
@one_of_each
def test_frozen_operands_cost_nothing(name: str, frozen: str) -> None:
    """No op for a gradient that nobody wants, no encode beyond that of the input, and the others' gradients
    unchanged.
    """
    case = BY_NAME[name]
    qat = prepared(case, layer(case, BF16))
    x, g = data("normal", 6, case.k, BF16, 1), data("normal", 6, case.n, BF16, 2)
    want = reference(qat, x, g)
    qat.weight.requires_grad_("weight" not in frozen)
    qat.bias.requires_grad_("bias" not in frozen)
    x = x.requires_grad_("x" not in frozen.split())
    with counting("encode", "gradients", "bgrad", "matmul", "saturated") as calls:
        y = qat(x)
        forward = {op: len(c) for op, c in calls.items()}
        if y.requires_grad:
            y.backward(g)
        else:
            assert frozen == "x weight bias" and y.grad_fn is None
    quantised = qat.prepared.recipe.fprop_input is not None
    assert forward == {"encode": int(quantised), "gradients": 0, "bgrad": 0, "matmul": 1, "saturated": 0}
    assert len(calls["encode"]) == forward["encode"]
    of_x, of_w = x.requires_grad, quantised and qat.weight.requires_grad
    assert [(c["w_matrix"] is not None, c["x_matrix"] is not None) for c in calls["gradients"]] == [(of_x, of_w)] * (
        of_x or of_w
    )
    assert len(calls["bgrad"]) == qat.bias.requires_grad
    for part, tensor in (("x", x), ("weight", qat.weight), ("bias", qat.bias)):
        assert (tensor.grad is not None) == tensor.requires_grad
        if tensor.requires_grad:
            assert_equal(tensor.grad, want[part], part)


# Accumulation and resume


@pytest.mark.parametrize("dtype", [BF16, F32], ids=dtype_name)
@one_of_each
def test_gradient_accumulation(name: str, dtype: torch.dtype) -> None:
    """Two micro-batches add the reference's two gradients exactly; where scales are per row, that is the whole
    batch's.
    """
    case = BY_NAME[name]
    qat = prepared(case, layer(case, dtype))
    x, g = data("normal", 12, case.k, dtype, 1), data("normal", 12, case.n, dtype, 2)
    halves = [(x[:6], g[:6]), (x[6:], g[6:])]
    for xs, gs in halves:
        qat(xs).backward(gs)
    first, second = (reference(qat, *half) for half in halves)
    assert_equal(qat.weight.grad, first["weight"] + second["weight"])
    assert_equal(qat.bias.grad, first["bias"] + second["bias"])
    fmt = qat.prepared.recipe.fprop_input
    if fmt is None or (getattr(fmt, "per", "row") == "row" and getattr(fmt, "outer", "none") == "none"):
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(qat.weight.grad, reference(qat, x, g)["weight"], rtol=2 * eps, atol=12 * eps)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=dtype_name)
@pytest.mark.parametrize("recipe", ["fp8-row", "int4", "nvfp4", "gridflip"])
def test_resume_is_bitwise(recipe: str, dtype: torch.dtype) -> None:
    """Stop after three steps, load into fresh objects, go on: parameters, moments and losses as if never stopped."""
    x, target = data("normal", 64, 64, dtype, 1), data("normal", 64, 64, F32, 2)
    model = student(RECIPES[recipe], dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    steps(model, optimizer, x, target, 3)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    want = steps(model, optimizer, x, target, 3)

    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert list(state["model"]) == list(student(None).state_dict())
    resumed = student(RECIPES[recipe], dtype)
    with torch.no_grad():
        for p in resumed.parameters():
            p.zero_()  # nothing may survive from the fresh initialisation
    resumed.load_state_dict(state["model"])
    again = torch.optim.AdamW(resumed.parameters(), lr=3e-3)
    again.load_state_dict(state["optimizer"])
    assert steps(resumed, again, x, target, 3) == want
    for (name, a), b in zip(model.named_parameters(), resumed.parameters(), strict=True):
        assert_equal(a, b, name)


_RESUME = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from support.linear_cases import F32, data
from support.training_cases import RECIPES, steps, student
state = torch.load(sys.argv[2], weights_only=True)
model = student(RECIPES["nvfp4"])
model.load_state_dict(state["model"])
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
optimizer.load_state_dict(state["optimizer"])
torch.set_num_threads(int(sys.argv[3]))
steps(model, optimizer, data("normal", 64, 64, F32, 1), data("normal", 64, 64, F32, 2), 3)
torch.save(model.state_dict(), sys.argv[2])
"""


@pytest.mark.slow
def test_resume_in_a_new_process(tmp_path: Path) -> None:
    x, target = data("normal", 64, 64, F32, 1), data("normal", 64, 64, F32, 2)
    model = student(RECIPES["nvfp4"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    steps(model, optimizer, x, target, 3)
    file = tmp_path / "checkpoint.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    steps(model, optimizer, x, target, 3)
    here = str(Path(__file__).parent.parent)
    subprocess.run(
        [sys.executable, "-c", _RESUME, here, str(file), str(torch.get_num_threads())], check=True, timeout=240
    )
    for name, want in torch.load(file, weights_only=True).items():
        assert_equal(model.state_dict()[name], want, name)


# The toy of spec/torchao.md: 300 AdamW steps, a student of 64-64-64 after a teacher of 64-256-64; the target's variance
# is .056


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


@cache
def trained_toy(recipe: str) -> tuple[float, nn.Module, Tensor, Tensor]:
    return toy(RECIPES[recipe], anneal=True)


@pytest.mark.parametrize(
    "recipe", ["int8-int8", *(pytest.param(r, marks=pytest.mark.slow) for r in ("fp8-row", "fp8-tensor", "mxfp8"))]
)
def test_toy_in_eight_bits_is_within_five_percent_of_float32(recipe: str) -> None:
    """At a constant learning rate. Measured: 0.997, 1.002, 1.002 and 1.008 times float32's loss."""
    assert toy(RECIPES[recipe], anneal=False)[0] <= 1.05 * float32_toy(anneal=False)[0]


# At a constant rate of 3e-3 four-bit weights keep hopping between codes: 1.11, 1.11, 1.24 and 1.39 times float32's
# loss. With the rate annealed int4 comes within 5 %; fp4 activations and weights do not, for want of precision in so
# small a network: measured 1.033, 1.032, 1.103 and 1.154, where rounding float32's solution gives 1.056, 1.056, 1.162
# and 1.241.
FOUR_BITS = {"int4": 1.05, "int4-int8": 1.05, "nvfp4": 1.15, "mxfp4": 1.2}


@pytest.mark.parametrize(
    "recipe", ["nvfp4", *(pytest.param(r, marks=pytest.mark.slow) for r in ("int4", "int4-int8", "mxfp4"))]
)
def test_toy_in_four_bits_beats_rounding_afterwards(recipe: str) -> None:
    """Training recovers at least a quarter of what rounding costs."""
    float32, model, x, target = float32_toy(anneal=True)
    rounded = copy.deepcopy(model)
    quantize_(rounded, RECIPES[recipe])
    with torch.no_grad():
        afterwards = float(F.mse_loss(rounded(x), target))
    trained = trained_toy(recipe)[0]
    assert trained - float32 < 0.75 * (afterwards - float32), (
        f"{trained / float32:.3f}, rounded {afterwards / float32:.3f}"
    )
    assert trained <= FOUR_BITS[recipe] * float32, f"{trained / float32:.3f} of float32's loss"


def test_toy_converts_to_what_was_trained() -> None:
    """After 300 steps, the converted model is the model that was trained."""
    _, model, x, _ = trained_toy("nvfp4")
    converted_model = copy.deepcopy(model)
    quantize_(converted_model, QATConfig(RECIPES["nvfp4"], step="convert"))
    assert_equal(converted_model(x), model(x))
