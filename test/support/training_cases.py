"""A small student, the kinds of training that it goes through, and its training loop; a process that resumes a run
imports them too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from aoquant import Int8WeightConfig, MXFP4WeightConfig, QATConfig, calibrate, quantize_
from aoquant.calibrate import uncalibrated
from aoquant.recipes import FP8_HYBRID, get_recipe

from .linear_cases import assert_equal

_LEARNED = Int8WeightConfig("tensor", activation="int8-tensor-asym-static")
# One training of each mechanism: weights alone, activations, transforms, masks, scales that a layer holds, quantised
# gradients with and without random numbers, one cast for each operand, and delayed scaling.
KINDS: dict[str, Any] = {
    "int4-g32": QATConfig("int4-g32"),
    "nvfp4": QATConfig("nvfp4"),
    "gridflip": QATConfig("gridflip"),
    "mxfp4-h32": QATConfig("mxfp4-h32"),
    "clipped": QATConfig(MXFP4WeightConfig("floor"), straight_through="clipped"),
    "static": QATConfig("int8-static"),
    "learned": QATConfig(_LEARNED, scales="learned"),
    "quartet": get_recipe("quartet").prepare(seed=3),
    "quartet2": get_recipe("quartet2").prepare(seed=3),
    "mxfp8-nvfp4": get_recipe("mxfp8-nvfp4").prepare(),
    "fp8-hybrid": get_recipe("fp8-hybrid").prepare(),
    "nvfp4-training": get_recipe("nvfp4-training").prepare(seed=3),
    "delayed": QATConfig("fp8-hybrid", backward=FP8_HYBRID.replaced(amax_history=4)),
}


def batch(rows: int = 40, seed: int = 4) -> tuple[Tensor, Tensor]:
    """x (rows, 64) and a target. 40 rows are a multiple of no block."""
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed))
    return x, torch.tanh(x.flip(1))


def student(
    config: Any, dtype: torch.dtype = torch.float32, *, seed: int = 1, calibrated: bool = True
) -> nn.Sequential:
    """Two linear layers of 64 inputs, prepared by `config` unless it is None."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64)).to(dtype)
    if config is not None:
        quantize_(model, config)
    if calibrated and uncalibrated(model):
        calibrate(model, [batch()[0].to(dtype)])
    return model


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    x: Tensor,
    target: Tensor,
    n: int,
    *,
    anneal: bool = False,
    call: Any = None,
) -> list[float]:
    """The losses of n steps."""
    losses = []
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, n) if anneal else None
    for _ in range(n):
        optimizer.zero_grad()
        loss = F.mse_loss((model if call is None else call)(x).float(), target)
        loss.backward()
        optimizer.step()
        if schedule:
            schedule.step()
        losses.append(float(loss.detach()))
    return losses


def step(module: nn.Module, x: Tensor, g: Tensor, run: Any = None) -> dict[str, Tensor]:
    """The output and every gradient of one forward and backward."""
    module.zero_grad()
    x = x.detach().clone().requires_grad_()
    y = (module if run is None else run)(x)
    y.backward(g)
    assert x.grad is not None
    return {"y": y.detach(), "x": x.grad} | {n: p.grad for n, p in module.named_parameters() if p.grad is not None}


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Equal names, dtypes and bits."""
    assert list(got) == list(want)
    for name, t in want.items():
        assert_equal(got[name], t, name)
