"""A run as one CUDA graph, which is what a benchmark times: the device's work, with no host between kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def graphed(run: Callable[[], Any], warm_up: int = 2) -> Callable[[], None]:
    """A replay of `run`, captured after it ran `warm_up` times: what compiles or allocates once does so before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm_up):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()

    def replay(run: Callable[[], Any] = run) -> None:  # holds what the graph reads
        graph.replay()

    return replay


def in_turns(run: Callable[[int], Any], copies: int) -> Callable[[], None]:
    """A graph of run(0), run(1), ... run(copies - 1)."""

    def every() -> None:
        for i in range(copies):
            run(i)

    return graphed(every, warm_up=1)
