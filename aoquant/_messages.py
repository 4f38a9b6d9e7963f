"""Tell a user: warnings, refusals of wrong arguments, lists of layers, progress on a terminal."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from typing import TypeVar

from torch import nn

T = TypeVar("T")
SHOWN = 10  # lines of a message


class AoquantWarning(UserWarning):
    """Mark every warning of aoquant's, so that a program can filter them alone:

    warnings.filterwarnings("error", category=aoquant.AoquantWarning)
    """


def check_model(given: object, name: str = "model") -> None:
    """Raise ValueError unless the argument called `name` is a module."""
    if not isinstance(given, nn.Module):
        raise ValueError(
            f"{name} must be an nn.Module, got {type(given).__name__}: give the model itself, not a list, its name or its state_dict"
        )


def check_path(given: object, name: str, what: str) -> None:
    """Raise ValueError unless the argument called `name` is a path. what: has to be given."""
    if not isinstance(given, str | os.PathLike):
        raise ValueError(f"{name} must be {what}, got {type(given).__name__}: give a path, a str or os.PathLike")


def folded(lines: Iterable[str]) -> list[str]:
    """Lines that differ in the numbers of layers only, as one: "model.layers.*.mlp.up_proj (64, 64): ... (12
    layers)".
    """
    groups: dict[str, list[str]] = {}
    for line in lines:
        groups.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "*", line), []).append(line)
    return [group[0] if len(group) == 1 else f"{line} ({len(group)} layers)" for line, group in groups.items()]


def listed(lines: Iterable[str]) -> str:
    """`first` of the folded lines."""
    return first(folded(lines))


def first(lines: Sequence[str]) -> str:
    """The first lines, each on a line of its own and indented, and how many more there are."""
    more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return "".join(f"\n  {line}" for line in (*lines[:SHOWN], *more))


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
def bar(total: int, label: str, unit: str = "B") -> Iterator[Callable[[int, str], None]]:
    """A bar over `total` bytes, or other units, with rate and remaining time; gives the function to call with units
    done and what they were.
    """
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda done, what: None
        return
    with tqdm(total=total, desc=label, unit=unit, unit_scale=unit == "B", disable=None, leave=False) as shown:

        def advance(done: int, what: str) -> None:
            shown.set_postfix_str(what, refresh=False)
            shown.update(done)

        yield advance
