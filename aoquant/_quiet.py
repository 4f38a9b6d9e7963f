"""The `aoquant` command keeps three lines of torchao and torch off the terminal that do not concern its users.

torchao logs a line for each of its compiled libraries that was built for another Python or GPU, and torch one for each
Enum of torchao's that is registered in an old way. In Python they stay, because there a program
may use torchao itself; the command never calls those libraries without saying so (`aoquant doctor`).
"""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path

_LINES = {"torchao": "Failed to load ", "torch.utils._pytree": "%s is an Enum subclass and is now natively supported"}

_M = re.compile("-[bBdEiIOPqRsSuvVx]*m(.*)")  # flags without a value of their own may stand in front of m


def quiet_the_command() -> None:
    """Filter those lines in a process of `aoquant` or `python -m aoquant`; called before torch is imported."""
    if _is_command():
        for logger, line in _LINES.items():
            logging.getLogger(logger).addFilter(_without(line))


def _without(line: str) -> logging.Filter:
    filter = logging.Filter()
    filter.filter = lambda record: not str(record.msg).startswith(line)  # type: ignore[method-assign]
    return filter


def _is_command() -> bool:
    script = Path(sys.argv[0]).name if sys.argv else ""
    if script == "-m":  # what stands there until the module is found
        return _module(sys.orig_argv) == "aoquant"
    return script in ("aoquant", "aoquant.exe")


def _module(arguments: list[str]) -> str | None:
    """The module of `python -m`: behind -m, behind flags and an m as in -um, or joined to it as in -mNAME."""
    for argument, following in zip(arguments[1:], [*arguments[2:], ""], strict=False):
        if found := _M.fullmatch(argument):
            return found[1] or following
    return None
