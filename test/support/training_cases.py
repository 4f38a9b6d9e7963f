"""A small student, the configs it trains under, and its training loop; a subprocess that resumes a run imports them
too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from aoquant import (
    FP8WeightConfig,
    GridFlipFP4WeightConfig,
    Int4WeightConfig,
    Int8WeightConfig,
    MXFP4WeightConfig,
    MXFP8WeightConfig,
    NVFP4WeightConfig,
    QATConfig,
    quantize_,
)

RECIPES: dict[str, Any] = {
    "fp8-row": FP8WeightConfig(),
    "fp8-tensor": FP8WeightConfig(granularity="tensor", activation="fp8-tensor"),
    "int8-int8": Int8WeightConfig(activation="int8-row"),
    "mxfp8": MXFP8WeightConfig(),
    "int4": Int4WeightConfig(32),
    "int4-int8": Int4WeightConfig(32, activation="int8-row"),
    "nvfp4": NVFP4WeightConfig(),
    "fouroversix": NVFP4WeightConfig(rule="four_over_six", activation="fouroversix"),
    "gridflip": GridFlipFP4WeightConfig(),
    "mxfp4": MXFP4WeightConfig(),
}


def student(config: Any, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).to(dtype)
    if config is not None:
        quantize_(model, QATConfig(config))
    return model


def steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, target: Tensor, n: int, *, anneal: bool = False
) -> list[float]:
    """The losses of n steps."""
    losses = []
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, n) if anneal else None
    for _ in range(n):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x).float(), target)
        loss.backward()
        optimizer.step()
        if schedule:
            schedule.step()
        losses.append(float(loss.detach()))
    return losses
