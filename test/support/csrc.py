"""The operators of csrc's kernels as its sources define them, for tests without the library."""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "csrc"))
import builder


@cache
def schemas() -> dict[str, Any]:
    """Operator -> its schema."""
    found = {}
    for source in builder.sources():
        for literals in re.findall(r'm\.def\(\s*((?:"[^"]*"\s*)+)\)', source.read_text()):
            text = "".join(re.findall(r'"([^"]*)"', literals))
            found[text.split("(")[0]] = torch._C.parse_schema(f"aoquant_native::{text}")
    return found
