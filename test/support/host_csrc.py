"""Headers of csrc, compiled by the host's compiler."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def host_library(folder: Path, name: str, *flags: str) -> ctypes.CDLL:
    """test/support/NAME_host.cpp as a library, made in `folder`; the test is skipped where there is no g++."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    library = folder / f"{name}.so"
    source = str(ROOT / "test" / "support" / f"{name}_host.cpp")
    always = ["-O2", "-fPIC", "-shared", f"-I{ROOT / 'csrc'}"]
    subprocess.run([compiler, *always, *flags, source, "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))
