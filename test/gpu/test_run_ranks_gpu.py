"""`torchrun -m aoquant run` over NCCL on two GPUs: one table, checkpoints that one GPU goes on with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_make_one_job(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [
        "-m",
        "aoquant",
        "run",
        "--recipe",
        "nvfp4",
        "--steps",
        "40",
        "--batch-size",
        "8",
        "--out",
        str(tmp_path / "out"),
    ]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*torchrun, *command], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("recovered by QAT") == 1
    record = json.loads((tmp_path / "out" / "aoquant_run.json").read_text())
    assert record["ranks"] == 2 and record["min_sqnr_db"] == "inf" and record["reload"] == "logits bit-equal"
    scores = {stage["name"]: stage["perplexity"]["word_perplexity"] for stage in record["stages"]}
    assert scores["QAT, prepared"] == scores["QAT, converted"] < scores["PTQ"]
