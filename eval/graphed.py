"""A training step as one CUDA graph.

A small model's step is a few thousand kernels of a few microseconds, and Python needs longer to launch one than the
device to run it. A graph is launched at once: the device works without a pause, and several processes can share it.

A capture needs everything compiled, and the optimizer's state made, so a few steps run before it. What they changed is
put back; every step that counts is a replay, so a run that resumes does what the run that did not stop does.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest

import torch
from torch import Tensor

WARM_UP = 3


def graphed(
    step: Callable[[Tensor], Tensor], model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor
) -> Callable[[Tensor], Tensor]:
    """`step(batch) -> loss`, gradients zeroed at its end, as a graph: for batches of this one's shape; the loss is
    overwritten by the next.

    optimizer: capturable, its learning rate a tensor, its state (moments, step) zero where it has none yet.
    """
    fixed = batch.clone()
    before = [t.clone() for t in _state(model, optimizer)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            step(fixed)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.no_grad():
        for t, old in zip_longest(_state(model, optimizer), before):
            t.zero_() if old is None else t.copy_(old)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(fixed)

    def replay(batch: Tensor) -> Tensor:
        fixed.copy_(batch)
        graph.replay()
        return loss

    return replay


def _state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All that a step changes: parameters and buffers, then the optimizer's state."""
    moments = [t for state in optimizer.state.values() for t in state.values()]
    return [*model.state_dict().values(), *moments]
