"""Checkpoints of a fine-tune: every five minutes, at the end, and on Ctrl-C, which lets the step finish.

They are torch.distributed.checkpoint's: masters and moments under the names of their parameters, which load into any
number of ranks, and into one process without any. Another number of ranks adds gradients in another order, so the last
bits of a run that goes on with it differ; with the same number they do not.

    FOLDER/step-N/      the newest
    FOLDER/newest.json  N, written when the checkpoint is complete
"""

from __future__ import annotations

import json
import math
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from aoquant.integrations.atomic import replace_text
from aoquant.integrations.checkpoint import read_json
from aoquant.integrations.dcp_reader import TensorReader

CHECKPOINT_SECONDS = 300.0
NEWEST = "newest.json"
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class Checkpoints:
    """The newest checkpoint of one fine-tune in a folder. With a process group, `load` and `save` are collectives."""

    def __init__(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, losses: Tensor) -> None:
        self.folder, self.model, self.optimizer, self.losses = folder, model, optimizer, losses
        self.interrupted, self.saved = False, time.monotonic()
        (group,) = optimizer.param_groups
        for master in group["params"]:  # AdamW makes its moments at the first gradient
            zeros = {name: torch.zeros_like(master) for name in ("exp_avg", "exp_avg_sq")}
            step = torch.zeros((), device=master.device if group["fused"] else "cpu")
            optimizer.state[master] = {"step": step, **zeros}

    def wishes(self) -> tuple[bool, bool]:
        """(a checkpoint is due, the user wants to stop)."""
        return time.monotonic() - self.saved >= CHECKPOINT_SECONDS, self.interrupted

    def save(self, step: int) -> None:
        """The checkpoint after `step` steps, then the note that it is complete, then the older ones go."""
        with _in_one_process_too():
            save(self._state(), checkpoint_id=self.folder / f"step-{step}")
        if not dist.is_initialized() or dist.get_rank() == 0:
            replace_text(self.folder / NEWEST, json.dumps({"step": step}))
            for old in self.folder.glob("step-*"):
                if old.name != f"step-{step}":
                    shutil.rmtree(old)
        if dist.is_initialized():
            dist.barrier()
        self.saved = time.monotonic()

    @torch.no_grad()
    def load(self) -> int:
        """Give model, optimizer and losses what the folder holds; returns the steps that it is after, 0 for nothing."""
        if not (self.folder / NEWEST).is_file():
            return 0
        step = read_json(self.folder / NEWEST).get("step")
        if type(step) is not int or step < 1:
            raise ValueError(
                f"{self.folder / NEWEST}: must name a step, got {step!r:.80}: remove {self.folder}, and start the run again"
            )
        reader = TensorReader(self.folder / f"step-{step}")
        reader.read_metadata()  # here, because DCP wraps what is raised inside its load
        with _in_one_process_too():
            load(self._state(), storage_reader=reader)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        for p, master in zip(trained, self.optimizer.param_groups[0]["params"], strict=True):
            p.copy_(master)
        return step

    def _state(self) -> dict[str, Any]:
        """Everything that a step changes, by name: views, which DCP reads from and loads into."""
        names = [name for name, p in self.model.named_parameters() if p.requires_grad]
        masters = dict(zip(names, self.optimizer.param_groups[0]["params"], strict=True))
        state: dict[str, Any] = {"losses": self.losses, "buffers": dict(self.model.named_buffers())}
        state["masters"] = {name: master.data for name, master in masters.items()}
        for moment in _MOMENTS:
            state[moment] = {name: self.optimizer.state[master][moment] for name, master in masters.items()}
        return state


@contextmanager
def _in_one_process_too() -> Iterator[None]:
    """DCP warns that it takes one process for one where there is no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield


@contextmanager
def interrupts(keeper: Checkpoints | None, *, echo: float = 0.0) -> Iterator[None]:
    """The first Ctrl-C asks `keeper` to save and stop, the second one interrupts at once.

    echo: seconds in which another signal is the same Ctrl-C: torchrun passes on what its ranks got from the terminal.
    """
    if keeper is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    first = -math.inf

    def ask(*_: Any) -> None:
        nonlocal first
        now = time.monotonic()
        if keeper.interrupted and now - first >= echo:
            raise KeyboardInterrupt
        if not keeper.interrupted:
            keeper.interrupted, first = True, now
            print("\nstopping after this step; Ctrl-C again stops at once", file=sys.stderr, flush=True)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
