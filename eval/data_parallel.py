"""Training on several GPUs: each rank takes its part of every batch, and gradients are averaged.

torchrun says how many processes there are. All gradients travel in one tensor, so that a small model's step waits for
one message; a CUDA graph holds it with the rest of the step.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor


class Ranks:
    """This process among those that train one model. rank: its number; world: how many they are."""

    def __init__(self, device: str) -> None:
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.device = device
        if self.world > 1 and not dist.is_initialized():
            cuda = device.startswith("cuda")
            if cuda:
                torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            dist.init_process_group("nccl" if cuda else "gloo")

    @property
    def first(self) -> bool:
        return self.rank == 0

    def part(self, batch: Tensor) -> Tensor:
        """This rank's rows of a batch that all ranks know."""
        return batch[self.rank :: self.world]

    @torch.no_grad()
    def average(self, tensors: list[Tensor]) -> None:
        """Each tensor's mean over ranks, in place."""
        if self.world == 1:
            return
        flat = torch.cat([t.flatten() for t in tensors])
        dist.all_reduce(flat)
        flat /= self.world
        for t, mean in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            t.copy_(mean.view_as(t))

    def agreed(self, value: float) -> float:
        """The first rank's value, on all."""
        if self.world == 1:
            return value
        said = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.broadcast(said, 0)
        return float(said)

    def wait(self) -> None:
        """For the others."""
        self.agreed(0)

    def leave(self) -> None:
        """End the process group."""
        if self.world > 1:
            dist.destroy_process_group()
