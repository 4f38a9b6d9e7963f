"""Pages with measured numbers, written by the programs that measured them: `experiments/publish.py` the README's,
`benchmarks/publish.py` those of docs/evidence.

The numbers of NAME stand between `<!-- NAME -->` and `<!-- end of NAME -->`. Its program replaces all of that, so no
number is typed by hand.
"""

from __future__ import annotations

from pathlib import Path


def between(page: Path, name: str, content: str) -> None:
    """Replace what stands between the marks of `name` in a page.

    Raises:
        ValueError: the page does not have both marks.
    """
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, begun, rest = page.read_text(encoding="utf-8").partition(begin)
    _, ended, after = rest.partition(end)
    if not begun or not ended:
        raise ValueError(f"{page} must have the lines {begin} and {end}")
    page.write_text(f"{before}{begin}\n\n{content}\n\n{end}{after}", encoding="utf-8")
