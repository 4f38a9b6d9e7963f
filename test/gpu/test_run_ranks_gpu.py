"""The main job on two GPUs over NCCL, by torchrun and by accelerate: one report, prepared equals converted."""

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
LAUNCHERS = {
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"],
    "accelerate": [
        *("accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"),
        *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0", "--module"),
    ],
}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_gpus_make_one_job(launcher: str, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    command = [sys.executable, "-m", *LAUNCHERS[launcher], "aoquant", "run", "--recipe", "nvfp4", "--steps", "40"]
    command += ["--batch-size", "8", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("recovered by QAT") == 1
    record = json.loads((tmp_path / "out" / "aoquant_run.json").read_text())
    assert record["ranks"] == 2 and record["min_sqnr_db"] == "inf" and record["reload"] == "logits bit-equal"
    scores = {stage["name"]: stage["perplexity"]["word_perplexity"] for stage in record["stages"]}
    assert scores["QAT, prepared"] == scores["QAT, converted"] < scores["PTQ"]
