"""A Griffe extension: parameters in the reference, from docstrings as this project writes them.

A docstring here explains an argument or a field by a line "name: what it is.", with further lines indented or not. Markdown would run these
lines together, so each becomes an item of a list. "Raises:" and "Returns:" stay, and are the reader's sections.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

SECTIONS = ("Raises", "Returns", "Yields", "Example", "Examples", "Note")
NAMED = re.compile(r"^(\*{0,2}[a-z_]\w*(?:_\*)?(?:, \*{0,2}[a-z_]\w*(?:_\*)?)*): (.+)$")


def listed(text: str) -> str:
    """`text` with its "name: ..." lines as list items."""
    lines: list[str] = []
    inside = fenced = False
    for line in text.splitlines():
        if line.startswith("```"):
            fenced = not fenced
        named = None if fenced else NAMED.match(line)
        if named:
            if lines and lines[-1] and not inside:
                lines.append("")
            lines.append(f"- `{named[1]}`: {named[2]}")
        elif not line.strip() or line.partition(":")[0] in SECTIONS:
            lines.append(line)
        else:
            lines.append(f"  {line.strip()}" if inside else line)
        inside = bool(line.strip()) and (named is not None or inside)
    return "\n".join(lines)


class Docstrings(griffe.Extension):
    """Apply `listed` to each docstring of the package."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None and not obj.is_module:
            obj.docstring.value = listed(obj.docstring.value)
