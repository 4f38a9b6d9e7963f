"""A progress bar on a terminal: tqdm when it is installed and stderr is a terminal, nothing otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
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


@contextmanager
def bar(total: int, label: str) -> Iterator[Callable[[int, str], None]]:
    """A bar over `total` bytes with rate and remaining time; gives the function to call with bytes done and what they
    were.
    """
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda done, what: None
        return
    with tqdm(total=total, desc=label, unit="B", unit_scale=True, disable=None, leave=False) as shown:

        def advance(done: int, what: str) -> None:
            shown.set_postfix_str(what, refresh=False)
            shown.update(done)

        yield advance
