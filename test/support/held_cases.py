"""Configs with static and learned scales, and a small model to hold them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from aoquant import (
    FP8WeightConfig,
    GridFlipFP4WeightConfig,
    Int4WeightConfig,
    Int8WeightConfig,
    IntxWeightConfig,
    MXFP4WeightConfig,
    NVFP4WeightConfig,
    QATConfig,
    calibrate,
    quantize_,
)
from aoquant.linear.prepared import QATLinear

INT8 = Int8WeightConfig(activation="int8-tensor-static")
CONFIGS: dict[str, tuple[Any, dict[str, str]]] = {
    "int8": (INT8, {}),
    "int8-asym": (Int8WeightConfig(activation="int8-tensor-asym-static"), {}),
    "int8-frozen": (INT8, {"scales": "static"}),
    "int8-learned": (INT8, {"scales": "learned"}),
    "int8-asym-learned": (Int8WeightConfig("tensor", "int8-tensor-asym-static"), {"scales": "learned"}),
    "int8-clipped": (INT8, {"straight_through": "clipped"}),
    "intx3-learned": (IntxWeightConfig(3, 32), {"scales": "learned"}),
    "intx4-row-frozen": (IntxWeightConfig(4, None, "int8-tensor-static"), {"scales": "static"}),
    "fp8": (FP8WeightConfig(activation="fp8-tensor-static"), {}),
    "nvfp4": (NVFP4WeightConfig(activation="nvfp4-static"), {}),
    "fouroversix": (NVFP4WeightConfig(rule="four_over_six", activation="fouroversix-static"), {}),
    "gridflip-frozen": (GridFlipFP4WeightConfig(activation="fouroversix-static"), {"scales": "static"}),
    "nvfp4-frozen": (NVFP4WeightConfig(activation="nvfp4-static"), {"scales": "static"}),
    "mxfp4-frozen": (MXFP4WeightConfig(activation="fp8-tensor-static"), {"scales": "static"}),
    "int4-frozen": (Int4WeightConfig(32, activation="int8-tensor-static"), {"scales": "static"}),
}
QUICK = ("int8", "int8-asym-learned", "intx3-learned", "nvfp4-frozen")


def each(names: Iterable[str], quick: tuple[str, ...] = QUICK) -> Any:
    """Every config by name; all but the quick ones are slow."""
    marks = {n: [] if n in quick else [pytest.mark.slow] for n in names}
    return pytest.mark.parametrize("name", [pytest.param(n, marks=m) for n, m in marks.items()])


EACH = each(CONFIGS)
LEARNED = [name for name in CONFIGS if name.endswith("learned")]


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(64, 96, dtype=dtype)
        self.down = nn.Linear(96, 64, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def batches(n: int = 3, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    g = torch.Generator().manual_seed(5)
    return [torch.randn(2, 5, 64, generator=g).to(dtype) * (i + 1) for i in range(n)]


def prepared(name: str, dtype: torch.dtype = torch.bfloat16, *, calibrated: bool = True) -> Model:
    config, options = CONFIGS[name]
    model = Model(dtype)
    quantize_(model, QATConfig(config, **options))
    if calibrated:
        calibrate(model, batches(dtype=dtype))
    return model


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, dtype: torch.dtype = torch.bfloat16
) -> list[float]:
    losses = []
    for step in range(steps):
        x = batches(dtype=dtype)[step % 3]
        optimizer.zero_grad()
        loss = F.mse_loss(model(x).float(), x.float())
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)


def layers(model: nn.Module) -> dict[str, QATLinear]:
    return {n: m for n, m in model.named_modules() if isinstance(m, QATLinear)}
