"""The CPU kernels and the step library for a test: those beside aoquant, or a build of the sources at hand, made once
for all tests.

A checkout that was installed without them (pip isolates its builds from torch) has a C++ compiler all the same.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from aoquant.ops import native_cpu, native_step, router, sources

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "csrc"))
import cpu_builder  # noqa: E402
import step_builder  # noqa: E402


def built(library: ModuleType = native_cpu, builder: ModuleType = cpu_builder) -> Path:
    """Return aoquant's own if it is there, of these sources and this torch, else one in build/, named by them."""
    sanitized = os.environ.get("AOQUANT_SANITIZE", "0")
    if sanitized == "0" and library.LIBRARY.exists() and library.why_not() is None:
        return library.LIBRARY
    if (reason := cpu_builder.why_not(torch, cpu_builder.find_compiler())) is not None:
        pytest.skip(reason)
    name = library.LIBRARY.stem
    target = ROOT / "build" / f"{sources.symbol(name)}-torch{torch.__version__}-{sanitized}" / f"{name}.so"
    if not target.exists():
        mine = target.parent / str(os.getpid())  # workers may build at the same time
        builder.build(torch, mine / target.name, mine)
        os.replace(mine / target.name, target)
    return target


def with_library() -> Iterator[Path]:
    """Run what follows with the CPU kernels."""
    before, library = native_cpu.LIBRARY, built()
    native_cpu.LIBRARY = library
    router._routes.clear()
    if (reason := native_cpu.why_not()) is not None:
        pytest.skip(reason)
    yield library
    native_cpu.LIBRARY = before
    router._routes.clear()


def with_step_library() -> Iterator[Path]:
    """Run what follows with the step library."""
    before, library = native_step.LIBRARY, built(native_step, step_builder)
    native_step.LIBRARY = library
    if (reason := native_step.why_not()) is not None:
        pytest.skip(reason)
    yield library
    native_step.LIBRARY = before
