"""Load csrc's libraries, and tell which sources they were built from.

A library of other sources may take other arguments for the same ones, and give other bits without an error. So its
builder (csrc/builder.py, csrc/cpu_builder.py, which run this file) writes a digest of the sources into it, as the name
of a symbol, and in a checkout a library with another digest is not loaded. A wheel has no sources beside it: its
library and its Python are of one build.

The file is read, not loaded: what is loaded registers its operators, and stays.
"""

import hashlib
import logging
import mmap
from pathlib import Path

import torch

CSRC = Path(__file__).resolve().parents[2] / "csrc"
PARTS = {
    "_native": ("*.cu", "*.cuh", "*.h", "builder.py"),
    "_native_cpu": ("cpu/*.cpp", "cpu/*.h", "*.h", "cpu_builder.py"),
    "_native_step": ("step/*.cpp", "step/*.h", "step_builder.py"),
}


def symbol(library: str) -> str | None:
    """The symbol in a library, one of `PARTS`, that is built from the sources at hand; None without any."""
    if not (CSRC / "cpu_builder.py").exists():
        return None
    digest = hashlib.sha256()
    for file in sorted(file for part in PARTS[library] for file in CSRC.glob(part)):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return f"aoquant_sources_{digest.hexdigest()[:16]}"


def load(library: Path, name: str, needs: str, make: str) -> str | None:
    """Load a library, once; return the reason where there is none, it is another version's, or it does not load.

    name: as users are told. needs: what an install builds it with. make: the target that builds it in a checkout.
    """
    if not library.exists():
        return f"aoquant was installed without its {name} library: pip install --no-build-isolation ., with {needs}"
    if others(library):
        return f"aoquant's {name} library was built for another version of aoquant: make {make}"
    try:
        torch.ops.load_library(library)
    except OSError as error:
        return f"aoquant's {name} library does not load ({error}): build it again for this torch"
    logging.getLogger("aoquant.native").debug("loaded %s", library)
    return None


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
