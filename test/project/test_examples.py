"""The examples run as written, in an empty folder; FSDP2's by torchrun, in two processes of its own."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from aoquant import formats
from aoquant.ops import router

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
# what each prints at its end, after its own assertions
LAST = {
    "quickstart": "output SQNR min inf dB",
    "trainer": "it computes what was trained, bit for bit",
    "lora": "adapters beside packed weights:\n  step 0",
    "grpo": "2 rollouts by the packed copy, with the log-probabilities of the model in training",
    "own_format": "bits a weight: PackedTensor",
    "own_kernel": ": own\n",
}
FSDP2 = "2 ranks: shards hold the codes of the whole weight"


@pytest.mark.parametrize("name", LAST)
def test_an_example_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*LAST, "fsdp2"}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name])
    monkeypatch.setattr(formats, "_REGISTERED", {})  # own_format's goes with the test
    backends = list(router._backends)
    try:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    finally:
        router._backends[:] = backends  # own_kernel's goes with the test
        router._routes.clear()
        for cached in (formats.get_operand, formats._plain):
            cached.cache_clear()
    assert LAST[name] in capsys.readouterr().out


@pytest.mark.slow
def test_fsdp2_runs_on_two_ranks(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, str(EXAMPLES / "fsdp2.py")], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert FSDP2 in done.stdout
