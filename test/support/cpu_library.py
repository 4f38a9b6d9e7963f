"""The CPU kernels for a test: those beside aoquant, or a build of the sources at hand, made once for all tests.

A checkout that was installed without them (pip isolates its builds from torch) has a C++ compiler all the same.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from aoquant.ops import native_cpu, router, sources

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "csrc"))
import cpu_builder  # noqa: E402


def built() -> Path:
    """The library: aoquant's own if it is there and of these sources, else one in build/, named by them and torch."""
    sanitized = os.environ.get("AOQUANT_SANITIZE", "0")
    if sanitized == "0" and native_cpu.LIBRARY.exists() and not sources.others(native_cpu.LIBRARY):
        return native_cpu.LIBRARY
    if (reason := cpu_builder.why_not(torch, cpu_builder.find_compiler())) is not None:
        pytest.skip(reason)
    target = ROOT / "build" / f"{sources.symbol('_native_cpu')}-torch{torch.__version__}-{sanitized}" / "_native_cpu.so"
    if not target.exists():
        mine = target.parent / str(os.getpid())  # workers may build at the same time
        cpu_builder.build(torch, mine / target.name, mine)
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
