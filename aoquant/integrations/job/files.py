"""The JSON files of a run: written whole or not at all, and read as data that somebody may have edited."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from aoquant.integrations.atomic import replace_text
from aoquant.integrations.checkpoint import read_json

T = TypeVar("T")


def write_json(path: Path, content: Any) -> None:
    """Write JSON so that the file is there whole or not at all."""
    replace_text(path, json.dumps(content, indent=1))


def read_as(path: Path, take: Callable[[dict[str, Any]], T]) -> T:
    """Return what `take` makes of the JSON object in a file of a run.

    Raises:
        ValueError: the file cannot be read, or does not hold what `take` looks for.
    """
    content = read_json(path)
    try:
        return take(content)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise ValueError(
            f"{path}: is no record of this version of aoquant run, or damaged ({type(error).__name__}: {error}): remove the file, or "
            "its folder, and run again"
        ) from error
