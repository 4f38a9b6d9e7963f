"""Tell a user: warnings, refusals of wrong arguments, lists of layers, progress of long work."""

import os
import re
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from typing import Any, TypeVar

from torch import distributed, nn

T = TypeVar("T")
SHOWN = 10  # lines of a message
_PASSED = ("aoquant", "torch", "contextlib", "functools")  # packages whose lines no warning names
SECONDS = 10.0  # between two lines of progress
on_command_line = ContextVar("on_command_line", default=False)


class AoquantWarning(UserWarning):
    """Mark every warning of aoquant's, so that a program can filter them alone:

    warnings.filterwarnings("error", category=aoquant.AoquantWarning)
    """


def advice(python: str, command: str) -> str:
    """Return what to do: `command` where the command line runs, whose users type options, and `python` elsewhere."""
    return command if on_command_line.get() else python


def warn(message: str) -> None:
    """Warn at the line that called aoquant, whatever lies between: more of aoquant, and what torch wraps around it."""
    depth, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _PASSED:
        depth, frame = depth + 1, frame.f_back
    warnings.warn(message, AoquantWarning, stacklevel=depth)


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


def refuse(problems: Mapping[str, str], unchanged: str = "the model is unchanged") -> None:
    """Raise ValueError with the problem of each layer that cannot be calibrated; nothing without one."""
    if problems:
        shown = listed(f"{fqn}: {reason}" for fqn, reason in problems.items())
        raise ValueError(f"{len(problems)} layer(s) cannot be calibrated; {unchanged}:{shown}")


@contextmanager
def naming(what: str, then: str = "") -> Iterator[None]:
    """Put what a ValueError that is raised inside is about in front of it, and what to do behind it."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{what}: {error}{then}") from None


def one_line(error: BaseException) -> str:
    """Return what an error says, in one line; its class where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__


def some(names: Sequence[str], count: int = 3) -> str:
    """Return the first names and how many more there are, on one line."""
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")


def track(items: Iterable[T], label: str, unit: str = "layer", *, lines: bool = False) -> Iterator[T]:
    """Iterate over `items` behind a bar called `label`, where there is a terminal; else, where `lines`, with lines."""
    total = len(items) if isinstance(items, Sized) else None
    with progress(total or 0, label, unit) if lines else _bar(total, label, unit, disable=None, leave=False) as shown:
        for item in items:
            yield item
            shown.update()


def bar(total: int, label: str) -> Any:
    """A bar over `total` bytes as `progress` gives it, where there is a terminal, with rate and remaining time."""
    return _bar(total, label, "B", unit_scale=True, disable=None, leave=False)


def _bar(total: int | None, label: str, unit: str, **options: Any) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        return Lines(total or 0, label, unit, show=False)
    return tqdm(total=total, desc=label, unit=unit, **options)


def progress(total: int, label: str, unit: str, *, show: bool = True) -> Any:
    """A bar or lines over `total` units: update(n), set_postfix(name=value), close(), and a `total` that may grow.

    A bar that redraws itself fills a log with control characters, so where stderr is no terminal there are lines: one
    at the start, then at most one every ten seconds, and one at the end. Of several ranks the first one writes.
    """
    if distributed.is_initialized():
        show = show and distributed.get_rank() == 0
    if show and (not sys.stderr.isatty() or find_spec("tqdm") is None):
        return Lines(total, label, unit)
    return _bar(total, label, unit, disable=not show)


class Lines:
    """A progress bar in lines: "QAT nvfp4: 40 of 80 steps, 50 %, loss=1.2345, 130 s, 130 s left"."""

    def __init__(self, total: int, label: str, unit: str, *, show: bool = True) -> None:
        self.total, self.label, self.unit, self.n, self.notes = total, label, unit, 0, ""
        self.show = show
        self.began = self.written = time.monotonic()
        self.last = -1  # what the last line said was done

    def update(self, n: int = 1) -> None:
        """Count n more units."""
        self.n += n
        if self.last < 0 or time.monotonic() - self.written >= SECONDS:
            self._write()

    def set_postfix(self, **notes: Any) -> None:
        """The words of a line, without its numbers."""
        self.notes = "".join(f", {name}={value}" for name, value in notes.items())

    def close(self) -> None:
        """Write the last line, unless it stands there."""
        if self.last != self.n:
            self._write()

    def __enter__(self) -> "Lines":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self) -> None:
        if not self.show:
            return
        now = time.monotonic()
        gone, self.written, self.last = now - self.began, now, self.n
        share = f", {100 * self.n / self.total:.0f} %" if self.total else ""
        left = f", {gone * (self.total - self.n) / self.n:.0f} s left" if 0 < self.n < self.total else ""
        plural = "es" if self.unit.endswith("ch") else "s"
        done = f"{self.n} of {self.total} {self.unit}{plural}{share}"
        print(f"{self.label}: {done}{self.notes}, {gone:.0f} s{left}", file=sys.stderr, flush=True)
