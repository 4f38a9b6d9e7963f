"""A Griffe extension: parameters in the reference, from docstrings as this project writes them.

A docstring here explains an argument or a field in a line "name: what it is.", with further lines indented or not; a
short explanation may share its line with the next one. Markdown would run these lines together, so each becomes an item
of a list. "Raises:" and "Returns:" stay as they are: Griffe reads these sections.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import griffe

SECTIONS = ("Raises", "Returns", "Yields", "Example", "Examples", "Note")
NAMES = r"\*{0,2}[a-z_]\w*(?:, \*{0,2}[a-z_]\w*)*"
NAMED = re.compile(rf"^({NAMES}): (.+)$")
WITHIN = re.compile(rf"(?<=\.) ({NAMES}): ")


def listed(text: str, known: Collection[str]) -> str:
    """`text` with the lines that explain a `known` name as list items."""

    def all_known(names: str) -> bool:
        return all(name.lstrip("*") in known for name in names.split(", "))

    split = WITHIN.sub(lambda m: f"\n{m[1]}: " if all_known(m[1]) else m[0], text)
    lines: list[str] = []
    inside = fenced = False
    for line in split.splitlines():
        fenced ^= line.startswith("```")
        named = None if fenced else NAMED.match(line)
        if named and all_known(named[1]):
            if lines and lines[-1] and not inside:
                lines.append("")
            lines.append(f"- `{named[1]}`: {named[2]}")
            inside = True
        elif not line.strip() or line.partition(":")[0] in SECTIONS:
            lines.append(line)
            inside = False
        else:
            lines.append(f"  {line.strip()}" if inside else line)
    return "\n".join(lines)


class Docstrings(griffe.Extension):
    """Apply `listed` to each function and class of a package."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        self._walk(pkg)

    def _walk(self, parent: griffe.Object) -> None:
        for member in parent.members.values():
            if isinstance(member, griffe.Alias):
                continue
            if member.docstring is not None and isinstance(member, griffe.Function | griffe.Class):
                known = {p.name.lstrip("*") for p in member.parameters} | set(member.members)
                member.docstring.value = listed(member.docstring.value, known)
            self._walk(member)
