"""Leave out the pictures of a run. Drawing them is a third of a small one; test_cli.py and test_report.py draw."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from aoquant.report import render


def without_pictures() -> Iterator[None]:
    """Write an empty file in the place of each picture."""

    def touch(*arguments: object) -> None:
        path = arguments[-1]
        assert isinstance(path, Path)
        path.touch()

    with mock.patch.multiple(render, bars=touch, ladder=touch):
        yield


no_pictures = contextmanager(without_pictures)
