"""Calibration on two processes: each sees its own batches, both hold the scales of all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.training_cases import assert_same
from support.two_ranks import make
from torch import nn

from aoquant import Int8WeightConfig, QATConfig, calibrate, quantize_

CONFIG = Int8WeightConfig(activation="int8-tensor-asym-static")


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))


def batch(rank: int) -> torch.Tensor:
    return torch.randn(4, 32, generator=torch.Generator().manual_seed(rank)) * (rank + 1)


def prepared() -> nn.Sequential:
    qat = model()
    quantize_(qat, QATConfig(CONFIG))
    return qat


def both_ranks_hold_the_scales_of_all_batches(rank: int, folder: Path) -> None:
    whole = prepared()
    calibrate(whole, [batch(0), batch(1)])
    qat = nn.parallel.DistributedDataParallel(prepared())
    calibrate(qat, [batch(rank)])
    assert_same(dict(qat.module.state_dict()), dict(whole.state_dict()))


@pytest.mark.slow
def test_two_ranks() -> None:
    make({"calibrate": both_ranks_hold_the_scales_of_all_batches})
