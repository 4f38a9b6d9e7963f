"""Measure what a layer costs: bytes that forward keeps for backward, how often a matrix is encoded, what is mapped."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from aoquant.ops import codec

Run = Callable[[Tensor], Tensor]


def _key(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


@contextmanager
def keeping(module: nn.Module) -> Iterator[dict[int, Tensor]]:
    """Collect the tensors that reach autograd's saved-tensor hooks, each storage once, parameters of `module` apart.

    A compiled graph's tensors go through these hooks as well.
    """
    own = {_key(p) for p in module.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        if _key(t) not in own:
            kept[_key(t)] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield kept


def nbytes(kept: dict[int, Tensor]) -> int:
    return sum(t.untyped_storage().nbytes() for t in kept.values())


def saved(module: nn.Module, run: Run, x: Tensor) -> int:
    """Return the bytes that reach the saved-tensor hooks during `run(x)`, whose backward must run too."""
    with keeping(module) as kept:
        y = run(x)
    y.float().sum().backward()
    assert all(p.grad is not None for p in module.parameters() if p.requires_grad), "backward did not run"
    module.zero_grad()
    return nbytes(kept)


class Made(TorchDispatchMode):
    """Remember the storages that are made inside the block, without keeping them alive."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, tuple[StorageWeakRef, int]] = {}  # by their addresses

    def add(self, t: Tensor) -> None:
        self.found[_key(t)] = StorageWeakRef(t.untyped_storage()), t.untyped_storage().nbytes()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and not is_traceable_wrapper_subclass(t):  # its parts are made by other calls
                self.add(t)
        return out

    def alive(self, *, without: set[int] = frozenset()) -> int:  # type: ignore[assignment]
        """Return the bytes that still live, each storage once."""
        return sum(n for k, (r, n) in self.found.items() if not r.expired() and k not in without)


def alive(module: nn.Module, run: Run, x: Tensor) -> int:
    """Return the bytes made during an eager `run(x)`, or of its input, that live on while the output does.

    Activation checkpointing hides what it keeps from the hooks of others, so `saved` does not see it.
    """
    own = {_key(p) for p in module.parameters()}
    made = Made()
    made.add(x)
    box = [x]
    del x
    with made:
        y = run(box.pop())
    gc.collect()
    found = made.alive(without={*own, _key(y)})
    y.float().sum().backward()
    module.zero_grad()
    return found


@contextmanager
def encodings() -> Iterator[Counter[tuple[int, ...]]]:
    """Count how often a matrix of each shape is encoded, by eager and compiled code. Shapes are in ascending order: the
    column side is encoded from the transposed matrix.
    """
    count: Counter[tuple[int, ...]] = Counter()
    real = codec.quantize

    def counted(operand: Any, x: Tensor, *rest: Any, **options: Any) -> Any:
        count[tuple(sorted(x.shape))] += not x.is_meta
        return real(operand, x, *rest, **options)

    with mock.patch.object(codec, "quantize", counted):
        yield count


class _Peak(Made):
    """Remember the most bytes that lived at once. What a kernel allocates inside itself is not seen."""

    peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.found = {k: (r, n) for k, (r, n) in self.found.items() if not r.expired()}
        self.peak = max(self.peak, self.alive())
        return out


def peak_bytes(run: Callable[[], Any]) -> int:
    """Return the most bytes that tensors made during `run()` take at once."""
    with _Peak() as meter:
        run()
    return meter.peak


def is_mapped(t: Tensor, folder: Path) -> bool:
    """Return whether a tensor's first byte is mapped from a file in a folder; skip the test without /proc."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs /proc")
    mapped = [line.split()[0].split("-") for line in maps.read_text().splitlines() if str(folder) in line]
    return any(int(a, 16) <= t.data_ptr() < int(b, 16) for a, b in mapped)
