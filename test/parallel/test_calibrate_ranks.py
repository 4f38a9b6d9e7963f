"""Calibration on two processes: each sees its own batches, both hold the scales of all."""

from __future__ import annotations

import os

import pytest
import torch
from support.two_ranks import on_two_ranks
from torch import distributed, multiprocessing, nn

from aoquant import Int8WeightConfig, QATConfig, calibrate, quantize_

CONFIG = Int8WeightConfig(activation="int8-tensor-asym-static")


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))


def batch(rank: int) -> torch.Tensor:
    return torch.randn(4, 32, generator=torch.Generator().manual_seed(rank)) * (rank + 1)


def worker(rank: int, port: int, queue: multiprocessing.SimpleQueue) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", rank=rank, world_size=2)
    try:
        qat = nn.parallel.DistributedDataParallel(_prepared())
        calibrate(qat, [batch(rank)])
        queue.put({k.removeprefix("module."): v.tolist() for k, v in qat.state_dict().items() if "input" in k})
    finally:
        distributed.destroy_process_group()


def _prepared() -> nn.Sequential:
    qat = model()
    quantize_(qat, QATConfig(CONFIG))
    return qat


@pytest.mark.slow
def test_two_ranks_hold_the_scales_of_both() -> None:
    found = on_two_ranks(worker)
    whole = _prepared()
    calibrate(whole, [batch(0), batch(1)])
    want = {k: v.tolist() for k, v in whole.state_dict().items() if "input" in k}
    assert found == [want, want]
