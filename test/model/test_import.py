"""What `import aoquant` costs: modules and time, each in a process of its own."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import pytest

from aoquant._moved import MOVED

_IMPORTS = """
import json, sys, time
start = time.process_time()
import {module}
print(json.dumps([time.process_time() - start, sorted(sys.modules)]))
import torch
assert not torch.cuda.is_initialized()
"""


def _import(module: str) -> tuple[float, set[str]]:
    out = subprocess.run(
        [sys.executable, "-c", _IMPORTS.format(module=module)], capture_output=True, text=True, check=True
    )
    seconds, modules = json.loads(out.stdout.strip().splitlines()[-1])
    return seconds, set(modules)


def test_import_is_light() -> None:
    """Nothing beyond what torchao.quantization imports, but our own files; no CUDA context. The time is checked
    below.
    """
    ours, theirs = _import("aoquant")[1], _import("torchao.quantization")[1]
    extra = {m for m in ours - theirs if not m.startswith("aoquant")}
    # the standard library's own small modules do not count
    assert {m for m in extra if m.partition(".")[0] not in sys.stdlib_module_names} == set()


def test_import_time() -> None:
    """Processor time below 1.5 times torchao.quantization's: the best of three runs each, taken in turns on a busy
    machine.
    """
    runs = [(_import("aoquant")[0], _import("torchao.quantization")[0]) for _ in range(3)]
    assert min(ours for ours, _ in runs) < 1.5 * min(theirs for _, theirs in runs)


@pytest.mark.parametrize("old", sorted(MOVED))
def test_modules_that_moved_import_by_their_old_name(old: str) -> None:
    """Attributes are the same objects, so classes pickled under the old name load."""
    alias, module = importlib.import_module(old), importlib.import_module(MOVED[old])
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    assert own
    for name in own:
        assert getattr(alias, name) is getattr(module, name), name
