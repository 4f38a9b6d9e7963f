"""Which code made a result: what the results of eval/experiments and of benchmarks/ name beside their date."""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@cache
def commit(root: Path = ROOT) -> str:
    """The commit of a checkout, 12 digits, with +dirty where tracked files differ from it; "" where git knows none.

    AOQUANT_COMMIT replaces it: a copy without its .git folder has the commit of the checkout that it was copied from.
    """
    if given := os.environ.get("AOQUANT_COMMIT"):
        return given
    git = ["git", "-C", str(root)]
    try:
        found, changed = (
            subprocess.run([*git, *words], capture_output=True, text=True, check=True).stdout.strip()
            for words in (["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return found + "+dirty" * bool(changed)
