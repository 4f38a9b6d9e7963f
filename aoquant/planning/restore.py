"""Modules put back as they were when the changes of a plan fail."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from aoquant.experts.prepared import QATExperts


@contextmanager
def restoring(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put `modules` back, the objects that they are, when the block raises anything, an interrupt too."""
    before = [(m, m.__class__, [(held, dict(held)) for held in _held_by(m)]) for m in modules]
    try:
        yield
    except BaseException:
        for module, cls, dictionaries in before:
            module.__class__ = cls
            for held, was in dictionaries:
                held.clear()
                held.update(was)
        raise


def _held_by(module: nn.Module) -> list[dict[str, Any]]:
    """Return the dictionaries that a change writes to."""
    stacks = [module.stacks] if isinstance(module, QATExperts) else []
    return [module.__dict__, module._parameters, module._buffers, *stacks]
