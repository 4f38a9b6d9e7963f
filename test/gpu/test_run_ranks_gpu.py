"""The main job on two GPUs over NCCL, by torchrun and by accelerate: one report, prepared equals converted; and an
error of one rank ends it.
"""

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


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_gpus_make_one_job(launcher: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", *LAUNCHERS[launcher], "aoquant", "run", "--recipe", "nvfp4", "--steps", "40"]
    command += ["--batch-size", "8", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=tmp_path, env=_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("recovered by QAT") == 1
    record = json.loads((tmp_path / "out" / "aoquant_run.json").read_text())
    assert record["ranks"] == 2 and record["min_sqnr_db"] == "inf" and record["reload"] == "logits bit-equal"
    scores = {stage["name"]: stage["perplexity"]["word_perplexity"] for stage in record["stages"]}
    assert scores["QAT, prepared"] == scores["QAT, converted"] < scores["PTQ"]


FAILING = """
import torch, torch.distributed as dist
from aoquant.integrations.launched import joined

with joined("cuda") as ranks:
    part = torch.ones(8, device="cuda")
    dist.all_reduce(part)
    if ranks.first:
        raise RuntimeError("one rank alone fails")
    dist.all_reduce(part)
    torch.cuda.synchronize()
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_rank_that_fails_ends_the_job(tmp_path: Path) -> None:
    """NCCL's shutdown waits for all ranks; without ending at once the job would hang until NCCL's timeout."""
    (tmp_path / "failing.py").write_text(FAILING)
    command = [sys.executable, "-m", *LAUNCHERS["torchrun"][:-1], str(tmp_path / "failing.py")]
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "one rank alone fails" in done.stderr
