"""Stochastic gradients: neighbours only, right on average in dx and in dW, rows and columns independent."""

from __future__ import annotations

import pytest
import torch
from support.hybrid_cases import data, layer, slope, values
from support.training_cases import step
from torch import Tensor

from aoquant import Cast, HybridConfig, get_format
from aoquant.formats import Random
from aoquant.formats.random import DGRAD_GRAD_OUTPUT, WGRAD_GRAD_OUTPUT, fresh_state

M, N, K = 64, 32, 32


@pytest.mark.parametrize("part", ["x", "weight"])
def test_the_mean_gradient_is_the_exact_one(part: str) -> None:
    """Within five standard errors, over 200 draws, of the product of the unrounded gradient with the other operand's
    codes.
    """
    gemm, other = ("dgrad", "weight") if part == "x" else ("wgrad", "input")
    casts = {f"{gemm}_grad_output": "nvfp4-sr", f"{gemm}_{other}": Cast("te-nvfp4")}
    config = HybridConfig(fprop_input=None, fprop_weight="mxfp8", **casts)
    linear, (x, g) = layer(config, torch.float32, n=N, k=K), data(torch.float32, m=M, n=N, k=K)
    draws = torch.stack([step(linear, x, g)[part] for _ in range(200)])
    if part == "x":
        exact = g @ values("te-nvfp4", linear.weight.detach().t()).t()
    else:
        exact = g.t() @ values("te-nvfp4", x.t().contiguous()).t()
    error, spread = (draws.mean(0) - exact).abs(), draws.std(0) / 200**0.5
    assert (error <= 5 * spread + 1e-6).all() and not torch.equal(draws[0], draws[1])
    assert abs(slope(draws.mean(0), exact) - 1) < 0.002


@pytest.mark.parametrize("name", ["nvfp4-sr", "mxfp4-sr", "ms-eden"])
def test_values_neither_shrink_nor_grow(name: str) -> None:
    """A million values: the slope's own noise is below .0002, and rounding to nearest has .99."""
    x = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(3))
    assert abs(slope(rounded(x, DGRAD_GRAD_OUTPUT, name), x) - 1) < 0.002


def rounded(x: Tensor, side: int, name: str = "nvfp4-sr") -> Tensor:
    f = get_format(name)
    return f.decode(f.encode(x, random=Random(fresh_state(3, "layer"), side)), torch.float32)


def test_the_errors_of_rows_and_columns_are_uncorrelated() -> None:
    x = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(1))
    rows, columns = rounded(x, DGRAD_GRAD_OUTPUT) - x, (rounded(x.t().contiguous(), WGRAD_GRAD_OUTPUT)).t() - x
    r = torch.corrcoef(torch.stack((rows.flatten(), columns.flatten())))[0, 1]
    again = rounded(x, WGRAD_GRAD_OUTPUT) - x
    same_blocks = torch.corrcoef(torch.stack((rows.flatten(), again.flatten())))[0, 1]
    assert rows.numel() >= 10**6 and r.abs() < 0.01 and same_blocks.abs() < 0.01


def test_only_neighbours_are_drawn() -> None:
    """Every value is the code below it or the code above it, under the scale of its block."""
    f, x = get_format("nvfp4-sr"), torch.randn(64, 64, generator=torch.Generator().manual_seed(2))
    e = f.encode(x, random=Random(fresh_state(3, "layer"), 0))
    assert e.scale is not None and e.outer is not None
    step_ = (e.scale.float() * e.outer).repeat_interleave(16, 1)
    y, code = (x / step_).abs(), (f.decode(e, torch.float32) / step_).abs()
    grid = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
    below = grid[(torch.bucketize(y, grid, right=True) - 1).clamp(max=7)]
    above = grid[torch.bucketize(y, grid).clamp(max=7)]
    near = (code - below).abs().minimum((code - above).abs())
    assert float(near.max()) < 1e-5 and float(y.max()) <= 6 + 1e-5
