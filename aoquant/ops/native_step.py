"""The library that `csrc/step/` builds: autograd's node of a layer's step that is repeated (linear/replay.py), and the
ops of compiled steps (define.py).

It lies beside this file when the install built the CUDA kernels (`csrc/step_builder.py`), and it need not be there:
steps are repeated all the same, with an autograd function and ops of Python's.
"""

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
    if library.exists() and not sources.holds(library, f"aoquant step for torch {torch.__version__}\0"):
        return f"aoquant's step library was built for another torch than {torch.__version__}: build it again"
    if (reason := sources.load(library, "step", "nvcc and a CUDA torch", "kernels")) is None:
        router.watch(_told)
    return reason


def _told(blocks: int) -> None:
    if blocks:
        operator("pause")(blocks)
    else:  # backends were added
        operator("forget_ops")()


@cache
def operator(name: str) -> Any:
    """Return an operator; ask `why_not` first."""
    return getattr(torch.ops.aoquant_step, name).default
