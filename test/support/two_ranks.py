"""Two processes of a process group of their own, for what a test in one process cannot show."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Callable
from typing import Any


def on_two_ranks(worker: Callable[[int, int, Any], None]) -> list[Any]:
    """What `worker(rank, port, queue)` puts into the queue on either rank, in the order of arrival."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    workers = [context.Process(target=worker, args=(rank, port, queue)) for rank in range(2)]
    for process in workers:
        process.start()
    found = [queue.get() for _ in workers]
    for process in workers:
        process.join(60)
        assert process.exitcode == 0
    return found
