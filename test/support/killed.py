"""End a process at a chosen operation on files, as a kill does: no handler of Python runs.

Python raises an audit event for each of its operations on files. A first call counts those that change a folder; a
forked child then ends itself before one of them. Bytes that a library writes into a staged file by itself raise no
event.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from os import link  # tests take os.link away
from pathlib import Path
from typing import Any

import pytest

_CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.truncate", "shutil.copyfile")
_armed: list[Callable[[], None]] = []
_installed: list[bool] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _armed and (event in _CHANGES or (event == "open" and set(arguments[1] or "") & set("wax+"))):
        _armed[-1]()


def _watched(call: Callable[[], None], each: Callable[[], None]) -> None:
    if not _installed:
        sys.addaudithook(_audit)
        _installed.append(True)
    _armed.append(each)
    try:
        call()
    finally:
        _armed.pop()


def operations(call: Callable[[], None]) -> int:
    """How many operations `call` changes files by."""
    seen: list[None] = []
    _watched(call, lambda: seen.append(None))
    return len(seen)


def left_by_kills(call: Callable[[], None], folder: Path, copies: Path) -> list[Path]:
    """Run `call` once, and copy `folder` before each operation: a kill there would leave that copy.

    One call and no processes, where `killed` forks a large process and calls again for each operation.
    """
    made: list[Path] = []

    def each() -> None:
        armed = _armed.pop()  # copying is no operation of the call
        made.append(copies / str(len(made)))
        copy(folder, made[-1])
        _armed.append(armed)

    copies.mkdir()
    _watched(call, each)
    return made


def copy(folder: Path, to: Path) -> None:
    """Copy a folder; two names of one file are two names of one file in the copy, which os.replace can tell."""
    seen: dict[int, str] = {}

    def once(source: str, target: str) -> None:
        inode = os.stat(source).st_ino
        if inode in seen:
            link(seen[inode], target)
        else:
            seen[inode] = target
            shutil.copyfile(source, target)

    shutil.copytree(folder, to, copy_function=once)


def killed(call: Callable[[], None], at: int) -> None:
    """Run `call` in a forked child that ends before its operation number `at`."""
    child = os.fork()
    if child == 0:
        left = [at]

        def end() -> None:
            if left[0] == 0:
                os._exit(9)
            left[0] -= 1

        try:
            _watched(call, end)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def interrupted(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, at: int) -> list[None]:
    """Have call number `at` of a function of `module` raise KeyboardInterrupt. The list grows at each call."""
    function, calls = getattr(module, name), list[None]()

    def counted(*arguments: Any) -> Any:
        calls.append(None)
        if len(calls) == at:
            raise KeyboardInterrupt
        return function(*arguments)

    monkeypatch.setattr(module, name, counted)
    return calls
