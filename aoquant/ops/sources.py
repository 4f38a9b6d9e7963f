"""Which sources of csrc a library was built from.

A library of other sources may take other arguments for the same ones, and give other bits without an error. So its
builder (csrc/builder.py, csrc/cpu_builder.py, which run this file) writes a digest of the sources into it, as the name
of a symbol, and in a checkout a library with another digest is not loaded. A wheel has no sources beside it: its
library and its Python are of one build.

The file is read, not loaded: what is loaded registers its operators, and stays.
"""

from __future__ import annotations

import hashlib
import mmap
from pathlib import Path

CSRC = Path(__file__).resolve().parents[2] / "csrc"
PARTS = {
    "_native": ("*.cu", "*.cuh", "*.h", "builder.py"),
    "_native_cpu": ("cpu/*.cpp", "cpu/*.h", "*.h", "cpu_builder.py"),
    "_native_step": ("step/*.cpp", "step_builder.py"),
}


def symbol(library: str) -> str | None:
    """The symbol in a library, one of `PARTS`, that is built from the sources at hand; None without any."""
    if not (CSRC / "cpu_builder.py").exists():
        return None
    digest = hashlib.sha256()
    for file in sorted(file for part in PARTS[library] for file in CSRC.glob(part)):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return f"aoquant_sources_{digest.hexdigest()[:16]}"


def others(library: Path) -> bool:
    """Return whether the library in this file was built from other sources than those at hand."""
    wanted = symbol(library.stem)
    if wanted is None or not library.stat().st_size:  # an empty file does not load
        return False
    return not holds(library, wanted)


def holds(library: Path, text: str) -> bool:
    """Return whether the library in this file holds a text; it is read, not loaded."""
    if not library.stat().st_size:  # an empty file cannot be mapped
        return False
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(text.encode()) >= 0
