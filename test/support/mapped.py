"""Whether a tensor is mapped from a file, so that it takes no memory of the process."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor


def is_mapped(t: Tensor, folder: Path) -> bool:
    """Return whether a tensor's first byte is mapped from a file in a folder; skip the test without /proc."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs /proc")
    mapped = [line.split()[0].split("-") for line in maps.read_text().splitlines() if str(folder) in line]
    return any(int(a, 16) <= t.data_ptr() < int(b, 16) for a, b in mapped)
