"""What `import aoquant` costs beside `import torchao.quantization`: modules and time, in a process of its own."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from functools import cache
from typing import NamedTuple

import pytest

from aoquant._register import MOVED

_IMPORTS = """
import json, logging, sys, time

def imported(module):
    start = time.process_time()
    __import__(module)
    return time.process_time() - start, sorted(sys.modules)

theirs, ours = imported("torchao.quantization"), imported("aoquant")
filters = [len(logging.getLogger(name).filters) for name in ("torchao", "torch.utils._pytree")]
print(json.dumps([*theirs, *ours, filters]))
import torch
assert not torch.cuda.is_initialized()
"""


class Imported(NamedTuple):
    """torchao.quantization and then aoquant: processor seconds, and modules so far; filters on loggers of torch(ao)."""

    their_seconds: float
    their_modules: list[str]
    our_seconds: float
    our_modules: list[str]
    filters: list[int]


def _import() -> Imported:
    out = subprocess.run([sys.executable, "-c", _IMPORTS], capture_output=True, text=True, check=True)
    return Imported(*json.loads(out.stdout.strip().splitlines()[-1]))


_once = cache(_import)


def test_import_is_light() -> None:
    """Nothing beyond what torchao.quantization imports, but our own files, reports among them; no CUDA context. The
    time is checked below.
    """
    ours, theirs = set(_once().our_modules), set(_once().their_modules)
    assert "aoquant.report" in ours - theirs
    extra = {m for m in ours - theirs if not m.startswith("aoquant")}
    # the standard library's own small modules do not count
    assert {m for m in extra if m.partition(".")[0] not in sys.stdlib_module_names} == set()


def test_import_time() -> None:
    """Processor time below half of torchao.quantization's, which comes first: the best of up to three on a busy
    machine.
    """
    shares = [_once().our_seconds / _once().their_seconds]
    while min(shares) >= 0.5 and len(shares) < 3:
        again = _import()
        shares.append(again.our_seconds / again.their_seconds)
    assert min(shares) < 0.5, shares


def test_in_python_the_lines_of_torch_stay() -> None:
    """The command keeps lines of torchao and torch off the terminal (test_cli.py); an import leaves their loggers."""
    assert _once().filters == [0, 0]


@pytest.mark.parametrize("old", sorted(old for old, new in MOVED.items() if new))
def test_modules_that_moved_import_by_their_old_name(old: str) -> None:
    """Attributes are the same objects, so classes pickled under the old name load."""
    importlib.import_module("peft")  # a pickle of adapters names peft's classes before ours
    alias, module = importlib.import_module(old), importlib.import_module(MOVED[old])
    own = [n for n, value in vars(module).items() if isinstance(value, type) and value.__module__ == module.__name__]
    assert own
    for name in own:
        assert getattr(alias, name) is getattr(module, name), name


_TAUGHT = """
import importlib, sys

importlib.import_module(sys.argv[1])
from peft.tuners.lora import model
from transformers import pytorch_utils, trainer
from transformers.modeling_utils import PreTrainedModel
from transformers.quantizers import auto
from aoquant.linear.kinds import KINDS

assert model.dispatch_torchao.__module__ == "aoquant.integrations.peft.dispatch"
assert {auto.AUTO_QUANTIZER_MAPPING[m].__module__ for m in ("torchao", "fp_quant")} == {"aoquant.integrations.hf_quantizer"}
assert [c.__name__ for c in trainer.DEFAULT_CALLBACKS].count("ScaleCallback") == 1
assert PreTrainedModel.save_pretrained.__code__.co_filename.endswith("pretrained_model.py")
assert any(kind.plain is pytorch_utils.Conv1D for kind in KINDS)
"""
_SLOW = (
    "conv1d",
    "hf_quantizer",
    "peft",
    "peft.dispatch",
    "peft.first",
    "peft.gradients",
    "pretrained_model",
    "trainer",
)


@pytest.mark.parametrize("first", ["peft.layers", *(pytest.param(name, marks=pytest.mark.slow) for name in _SLOW)])
def test_a_library_is_taught_whichever_module_is_the_first(first: str) -> None:
    """Also one that itself imports the library, whose import then meets this module half imported."""
    program = [sys.executable, "-c", _TAUGHT, f"aoquant.integrations.{first}"]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
