"""Progress of long work: a bar on a terminal, and plain lines where stderr is a file or a pipe.

A bar that redraws itself fills a log with control characters, so tqdm is usually switched off there, and an hour of
training prints nothing. `progress` gives one object for both: where there is no terminal it writes a line at the start,
then at most one every ten seconds, and one at the end.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from tqdm import tqdm

SECONDS = 10.0  # between two lines


def progress(total: int, label: str, unit: str, *, show: bool = True) -> Any:
    """A bar or lines over `total` units: update(n), set_postfix(name=value), close(), and a `total` that may grow."""
    if show and not sys.stderr.isatty():
        return Lines(total, label, unit)
    return tqdm(total=total, desc=label, unit=unit, disable=not show)


def no_bars_in_logs() -> None:
    """Switch off transformers' own bars where there is no terminal."""
    if not sys.stderr.isatty():
        from transformers.utils import logging

        logging.disable_progress_bar()


class Lines:
    """A progress bar in lines: "QAT nvfp4: 40 of 80 steps, 50 %, loss=1.2345, 130 s, 130 s left"."""

    def __init__(self, total: int, label: str, unit: str) -> None:
        self.total, self.label, self.unit, self.n, self.notes = total, label, unit, 0, ""
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

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self) -> None:
        now = time.monotonic()
        gone, self.written, self.last = now - self.began, now, self.n
        share = f", {100 * self.n / self.total:.0f} %" if self.total else ""
        left = f", {gone * (self.total - self.n) / self.n:.0f} s left" if 0 < self.n < self.total else ""
        done = f"{self.n} of {self.total} {self.unit}s{share}"
        print(f"{self.label}: {done}{self.notes}, {gone:.0f} s{left}", file=sys.stderr, flush=True)
