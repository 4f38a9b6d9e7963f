"""Checkpoints of a fine-tune: every five minutes, at the end, and on Ctrl-C, which lets the step finish.

Masters and moments stand in one safetensors file, whole, under the names of their parameters, so they load into any
number of ranks, and into one process without any. After the last step the file holds the trained weights alone: a sixth
of the bytes. Another number of ranks adds gradients in another order, so the last bits of a run that goes on with it
differ; with the same number they do not.
"""

import math
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from aoquant.files.atomic import give_place
from aoquant.files.safetensors_file import MALFORMED, header, reserve

CHECKPOINT_SECONDS = 300.0
NEWEST = "newest.safetensors"
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
        """Write the checkpoint after `step` steps over the one before."""
        writes, state = not dist.is_initialized() or dist.get_rank() == 0, self._state(step == len(self.losses))
        path = self.folder / NEWEST
        partial = path.with_suffix(".partial")
        if writes:
            self.folder.mkdir(parents=True, exist_ok=True)
            places = reserve(partial, state, {"step": str(step)})
        for name, tensor in state.items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if writes:
                places[name].write(whole)
        if writes:
            give_place(partial, path)
        if dist.is_initialized():
            dist.barrier()
        self.saved = time.monotonic()

    @torch.no_grad()
    def load(self) -> int:
        """Give model, optimizer and losses what the folder holds; returns the steps that it is after, 0 for nothing.

        Raises:
            ValueError: the file is damaged, or another model's.
        """
        path = self.folder / NEWEST
        if not path.is_file():
            return 0
        metadata, stored = header(path)
        trained = {f"weight.{name}": p for name, p in self.model.named_parameters() if p.requires_grad}
        complete = trained.keys() <= stored.keys()
        state = self._state(complete)
        try:
            if (step := int(metadata["step"])) < 1:
                raise ValueError(f"it names step {step}")
            for name in {**state, **stored}:
                if (state[name].shape, state[name].dtype) != (stored[name].shape, stored[name].dtype):
                    raise ValueError(f"{name} is {tuple(stored[name].shape)} of {stored[name].dtype}")
        except MALFORMED as error:
            raise ValueError(
                f"{path}: was not written by a run of aoquant, or is damaged ({error}): remove the stages folder, and "
                "start the run again"
            ) from error
        for name, tensor in state.items():
            whole = stored[name].read().to(tensor.device)
            if isinstance(tensor, DTensor):  # each rank has read the file, so none sends it
                whole = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
            tensor.copy_(whole)
        if not complete:
            for p, master in zip(trained.values(), self.optimizer.param_groups[0]["params"], strict=True):
                p.copy_(master)
        return step

    def _state(self, complete: bool) -> dict[str, Tensor]:
        """Return every tensor that further steps need, or a `complete` model: views, which loading copies into."""
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        state = {"losses": self.losses, **{f"buffers.{name}": b for name, b in self.model.named_buffers()}}
        if complete:
            return state | {f"weight.{name}": p.detach() for name, p in trained.items()}
        for name, master in zip(trained, self.optimizer.param_groups[0]["params"], strict=True):
            moments = self.optimizer.state[master]
            state[f"master.{name}"] = master.data
            state |= {f"{moment}.{name}": moments[moment] for moment in _MOMENTS}
        return state


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
