"""Two processes of a process group of their own, for what a test in one process cannot show."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from . import forked


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
