"""Modules put back as they were when the changes of a plan fail."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from aoquant.experts.prepared import QATExperts


@dataclass(frozen=True)
class _Before:
    """A module's class, and what its dictionaries held; stacks: of prepared experts."""

    module: nn.Module
    cls: type[nn.Module]
    attributes: dict[str, Any]
    parameters: dict[str, Any]
    buffers: dict[str, Any]
    stacks: dict[str, Any] | None

    @classmethod
    def of(cls, m: nn.Module) -> _Before:
        stacks = dict(m.stacks) if isinstance(m, QATExperts) else None
        return cls(m, m.__class__, dict(vars(m)), dict(m._parameters), dict(m._buffers), stacks)

    def restore(self) -> None:
        m = self.module
        m.__class__ = self.cls
        _refill(m.__dict__, self.attributes)
        _refill(m._parameters, self.parameters)
        _refill(m._buffers, self.buffers)
        if self.stacks is not None:
            assert isinstance(m, QATExperts)
            _refill(m.stacks, self.stacks)


def _refill(held: dict[str, Any], before: dict[str, Any]) -> None:
    held.clear()
    held.update(before)


@contextmanager
def restoring(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put `modules` back, the objects that they are, when the block raises anything, an interrupt too."""
    before = [_Before.of(m) for m in modules]
    try:
        yield
    except BaseException:
        for b in before:
            b.restore()
        raise
