"""A progress bar where somebody is watching: tqdm when it is installed and stderr is a terminal, nothing otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

T = TypeVar("T")


def track(items: Iterable[T], label: str, unit: str = "layer") -> Iterator[T]:
    """Iterate over `items` behind a bar called `label`."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield from items
        return
    total = len(items) if isinstance(items, Sized) else None
    yield from tqdm(items, desc=label, total=total, unit=unit, disable=None, leave=False)
