"""NVFP4, MXFP4 and MXFP8 emulated on Hopper: exact products, one rounding, sums within the tensor core's stated bound.

`accumulation.bound` is derived there; here the GPU has to keep it, on data made to break it. Because rounding is
monotone, an output that was rounded once lies between the roundings of the two ends of the interval that the bound
leaves for its accumulator.
"""

from __future__ import annotations

import pytest
import torch
from support.accumulation import KINDS, adversarial, bound
from torch import Tensor, nn

from aoquant import QATConfig, quantize_
from aoquant.linear.prepared import QATLinear
from aoquant.recipes import get_recipe

pytestmark = pytest.mark.gpu

BF16, CUDA = torch.bfloat16, torch.device("cuda")
RECIPES = ("nvfp4", "nvfp4-weight", "mxfp4", "mxfp4-weight", "mxfp8", "mxfp8-weight")


def prepared(recipe: str, w_NK: Tensor, bias: Tensor | None) -> nn.Sequential:
    n, k = w_NK.shape
    model = nn.Sequential(nn.Linear(k, n, bias=bias is not None, dtype=BF16, device=CUDA))
    with torch.no_grad():
        model[0].weight.copy_(w_NK)
        if bias is not None:
            model[0].bias.copy_(bias)
    quantize_(model, QATConfig(get_recipe(recipe).make()))
    return model


def operands(layer: QATLinear, x_MK: Tensor) -> tuple[Tensor, Tensor, Tensor | float]:
    """What the tensor core multiplies, x (M, K) and w (N, K), and the product of the outer scales."""
    recipe, alpha = layer.prepared.recipe, torch.ones(1, 1, dtype=torch.float64, device=CUDA)
    w = recipe.fprop_weight.encode(layer.weight.detach())
    w_NK, scale = recipe.fprop_weight.format.operand(w, BF16), recipe.fprop_weight.format.alpha(w)
    alpha = alpha if scale is None else alpha * scale.double().t()
    if recipe.fprop_input is not None:
        x = recipe.fprop_input.encode(x_MK)
        x_MK, scale = recipe.fprop_input.format.operand(x, BF16), recipe.fprop_input.format.alpha(x)
        alpha = alpha if scale is None else alpha * scale.double()
    return x_MK, w_NK, alpha


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_one_rounding_of_a_sum_within_the_bound(recipe: str, kind: str) -> None:
    worst = 0.0
    for m, n, k in ((1, 256, 4096), (64, 512, 14336), (2048, 4096, 4096), (4096, 1024, 1024)):
        w = adversarial("spread" if kind == "spread" else "normal", n, k, CUDA) * 0.02
        if kind == "dust":
            w = torch.full((n, k), 2.0**-13, dtype=BF16, device=CUDA)
            w[:, :32], w[:, -32:] = 1.0, 1.0
        bias = torch.randn(n, dtype=BF16, device=CUDA) * 0.01 if kind == "normal" else None
        model, x = prepared(recipe, w, bias), adversarial(kind, m, k, CUDA)
        with torch.no_grad():
            y = model(x)
        x_MK, w_NK, alpha = operands(model[0], x)
        exact = x_MK.double() @ w_NK.double().t() * alpha
        slack = bound(x_MK, w_NK) * alpha
        scaled = (exact.abs() + slack) * 3 * 2.0**-24  # two outer scales and a bias, each rounded in float32
        if bias is not None:
            exact = exact + bias.double()
            scaled = scaled + bias.double().abs() * 2.0**-24
        slack = (slack + scaled) * (1 + 2.0**-12)  # what these float64 sums round themselves is far below
        low, high = (exact - slack).to(BF16), (exact + slack).to(BF16)
        assert bool((low <= y).all()) and bool((y <= high).all()), f"{recipe} {kind} {m} x {n} x {k}"
        beyond = ((y.double() - exact).abs() - exact.abs() * 2.0**-8).clamp(min=0) / slack
        worst = max(worst, float(beyond.nan_to_num(0.0).max()))
        print(f"{recipe} {kind} {m} x {n} x {k}: {float((y != exact.to(BF16)).double().mean()):.2%} not the nearest")
    print(f"{recipe} {kind}: at least {worst:.3f} of the bound")
    if kind == "dust":
        assert worst > 0.1, "this data is to come near the bound"
