"""The processes of a job: one, or those that torchrun or `accelerate launch` started.

Every rank runs the same code on the same model; tokens and documents are shared out. What must happen once (looking at
the folder, writing, printing) happens on rank 0, and `share` gives all ranks its result, or ends them with its error.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
TIMEOUT = timedelta(hours=2)  # other ranks wait while rank 0 verifies and saves


@dataclass(frozen=True)
class Ranks:
    """This process among `size`. launched: by torchrun or its like, also where it started one alone."""

    rank: int = 0
    size: int = 1
    launched: bool = False

    @property
    def first(self) -> bool:
        """Return whether this one prints and writes."""
        return self.rank == 0

    def share(self, compute: Callable[[], T]) -> T:
        """Return what `compute` returns on rank 0, on every rank; what it returns must pickle. A collective.

        Raises:
            ValueError: as raised on rank 0, there; the other ranks end with status 2 in silence.
        """
        if not self.launched:
            return compute()
        box: list[Any] = [None, None]
        if self.first:
            try:
                box[0] = compute()
            except ValueError as error:
                box[1] = error
        dist.broadcast_object_list(box, src=0)
        if box[1] is not None:
            if self.first:
                raise box[1]
            sys.exit(2)
        return box[0]


def is_first() -> bool:
    """Return whether this process is rank 0 of what launched it, before and after `joined` too."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def joined(device: str) -> Iterator[Ranks]:
    """A process group for the ranks that a launcher started, with a GPU each on `device` "cuda"; one process otherwise.

    Within it "cuda" is the rank's own GPU. Bad input, an exit and Ctrl-C are taken to end all ranks alike.
    """
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
        yield Ranks()
        return
    cuda = torch.device(device).type == "cuda"
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=TIMEOUT)
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), launched=True)
    except (KeyboardInterrupt, SystemExit, ValueError):  # ends all ranks
        dist.destroy_process_group()
        raise
    # An error of one rank, such as out of memory, ends it at once, and the launcher then ends the others: NCCL would
    # wait for them here, while they wait for this one's part of a collective.
    dist.destroy_process_group()


def no_bars_in_logs() -> None:
    """Switch off transformers' own bars where there is no terminal."""
    if not sys.stderr.isatty():
        from transformers.utils import logging

        logging.disable_progress_bar()
