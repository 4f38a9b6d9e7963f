"""Two processes of a process group of their own, for what a test in one process cannot show."""

from __future__ import annotations

import functools
import os
import socket
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from . import forked

Check = Callable[[int, Path], None]


def on_two_ranks(worker: Callable[[int, int, Any], None]) -> list[Any]:
    """What `worker(rank, port, queue)` puts into the queue on either rank, in the order of arrival."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    queue = forked.context.SimpleQueue()
    workers = [forked.process(worker, rank, port, queue) for rank in range(2)]
    found = [queue.get() for _ in workers]
    for process in workers:
        process.join(60)
        assert process.exitcode == 0
    return found


def _run(checks: Mapping[str, Check], rank: int, port: int, queue: Any) -> None:
    torch.set_num_threads(1)
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in here.items()} | {"ACCELERATE_USE_CPU": "true"}
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    failed = {}
    for name, check in checks.items():
        try:
            check(rank, Path(str(folder[0])))
        except BaseException:
            failed[name] = f"rank {rank}: {traceback.format_exc()}"
    queue.put(failed)
    dist.destroy_process_group()


def make(checks: Mapping[str, Check]) -> None:
    """Run the checks on both ranks, which share a folder, and raise what failed on either.

    One pair of processes for all of them: starting it takes longer than most checks.
    """
    failed = on_two_ranks(functools.partial(_run, checks))
    assert not any(failed), "\n".join(text for found in failed for text in found.values())


def average(p: torch.Tensor) -> None:
    """Make a gradient the mean of both ranks', as a hook of a parameter."""
    assert p.grad is not None
    dist.all_reduce(p.grad)
    p.grad /= 2
