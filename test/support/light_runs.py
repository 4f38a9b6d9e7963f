"""Leave out of small runs what takes a third of their time. test_cli.py and test_estimate.py run it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from aoquant.integrations.job import needs
from aoquant.report import render


def light_runs() -> Iterator[None]:
    """Write an empty file in the place of each picture, and give the machine a speed that nobody measures."""

    def touch(*arguments: object) -> None:
        path = arguments[-1]
        assert isinstance(path, Path)
        path.touch()

    with mock.patch.multiple(render, bars=touch, ladder=touch), mock.patch.object(needs, "_speed", return_value=1e10):
        yield


lightly = contextmanager(light_runs)
