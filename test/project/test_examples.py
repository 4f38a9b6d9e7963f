"""The examples run as written, in an empty folder; FSDP2's in two processes of its own, under torchrun's variables."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from support.two_ranks import on_two_ranks

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


def _fsdp2(rank: int, port: int, queue: Any) -> None:
    """Run the example as torchrun starts it on one of two ranks; report what it prints, or its traceback."""
    torch.set_num_threads(1)
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in ranks.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "CUDA_VISIBLE_DEVICES": ""}
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            runpy.run_path(str(EXAMPLES / "fsdp2.py"), run_name="__main__")
    except BaseException:
        said.write(traceback.format_exc())
    queue.put(said.getvalue())


def test_fsdp2_runs_on_two_ranks() -> None:
    assert sorted(on_two_ranks(_fsdp2)) == ["", f"{FSDP2}\n"]
