"""What `import aoquant` costs: modules and time, each in a process of its own."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from functools import cache
from typing import NamedTuple

import pytest

from aoquant._moved import MOVED

_IMPORTS = """
import json, logging, sys, time
start = time.process_time()
import {module}
seconds = time.process_time() - start
filters = [len(logging.getLogger(name).filters) for name in ("torchao", "torch.utils._pytree")]
print(json.dumps([seconds, sorted(sys.modules), filters]))
import torch
assert not torch.cuda.is_initialized()
"""


class Imported(NamedTuple):
    """A module, imported in a process of its own: processor seconds, modules, and filters on loggers of torch(ao)."""

    seconds: float
    modules: list[str]
    filters: list[int]


def _import(module: str) -> Imported:
    out = subprocess.run(
        [sys.executable, "-c", _IMPORTS.format(module=module)], capture_output=True, text=True, check=True
    )
    return Imported(*json.loads(out.stdout.strip().splitlines()[-1]))


_once = cache(_import)


def test_import_is_light() -> None:
    """Nothing beyond what torchao.quantization imports, but our own files, reports among them; no CUDA context. The
    time is checked below.
    """
    ours, theirs = set(_once("aoquant").modules), set(_once("torchao.quantization").modules)
    assert "aoquant.report" in ours
    extra = {m for m in ours - theirs if not m.startswith("aoquant")}
    # the standard library's own small modules do not count
    assert {m for m in extra if m.partition(".")[0] not in sys.stdlib_module_names} == set()


def test_import_time() -> None:
    """Processor time below 1.5 times torchao.quantization's: the best of up to three runs each, taken in turns on a
    busy machine.
    """
    ours, theirs = [_once("aoquant").seconds], [_once("torchao.quantization").seconds]
    while min(ours) >= 1.5 * min(theirs) and len(ours) < 3:
        ours.append(_import("aoquant").seconds)
        theirs.append(_import("torchao.quantization").seconds)
    assert min(ours) < 1.5 * min(theirs), (ours, theirs)


def test_in_python_the_lines_of_torch_stay() -> None:
    """The command keeps lines of torchao and torch off the terminal (test_cli.py); an import leaves their loggers."""
    assert _once("aoquant").filters == [0, 0]


@pytest.mark.parametrize("old", sorted(MOVED))
def test_modules_that_moved_import_by_their_old_name(old: str) -> None:
    """Attributes are the same objects, so classes pickled under the old name load."""
    alias, module = importlib.import_module(old), importlib.import_module(MOVED[old])
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    assert own
    for name in own:
        assert getattr(alias, name) is getattr(module, name), name
