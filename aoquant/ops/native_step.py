"""The library that `csrc/step/` builds: autograd's node of a layer's step that is repeated (linear/replay.py).

It lies beside this file when the install built the CUDA kernels (`csrc/step_builder.py`), and it need not be there:
steps are repeated all the same, with an autograd function of Python's.
"""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import Any

import torch

from . import router, sources

LIBRARY = Path(__file__).with_name("_native_step.so")


def why_not() -> str | None:
    """Return why the library's operators cannot be called here, and what to do; None when they can."""
    return _load(LIBRARY)


@cache
def _load(library: Path) -> str | None:
    """Load the library once; the reason where there is none, or it is another version's."""
    if not library.exists():
        return "aoquant was installed without its step library: pip install --no-build-isolation ., with nvcc and a CUDA torch"
    if sources.others(library):
        return "aoquant's step library was built for another version of aoquant: make kernels"
    if not sources.holds(library, f"aoquant step for torch {torch.__version__}\0"):
        return f"aoquant's step library was built for another torch than {torch.__version__}: build it again"
    try:
        torch.ops.load_library(library)
    except OSError as error:
        return f"aoquant's step library does not load ({error}): build it again for this torch"
    router.watch(operator("pause"))
    logging.getLogger("aoquant.native").debug("loaded %s", library)
    return None


@cache
def operator(name: str) -> Any:
    """Return an operator; ask `why_not` first."""
    return getattr(torch.ops.aoquant_step, name).default
