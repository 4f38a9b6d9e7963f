"""What programs write into pages: tables, wrapped paragraphs, and the part of a page between two marks."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from aoquant.tools.markdown import table, wrapped

ROOT = Path(__file__).parents[2]


def test_a_part_of_a_page_is_replaced_between_its_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "eval"))
    pages = importlib.import_module("pages")
    page = tmp_path / "page.md"
    of_others = "<!-- b -->\n\nits own\n\n<!-- end of b -->"
    page.write_text(f"before\n<!-- a -->\nold\n<!-- end of a -->\n{of_others}\nafter\n", encoding="utf-8")
    for content in ("new ±", "newer ±"):
        pages.between(page, "a", content)
        want = f"before\n<!-- a -->\n\n{content}\n\n<!-- end of a -->\n{of_others}\nafter\n"
        assert page.read_text(encoding="utf-8") == want
    for broken in ("nothing", "<!-- a -->", "<!-- end of a --> <!-- a -->"):
        page.write_text(broken, encoding="utf-8")
        with pytest.raises(ValueError, match="must have the lines <!-- a --> and <!-- end of a -->"):
            pages.between(page, "a", "new")
        assert page.read_text(encoding="utf-8") == broken


def test_empty_cells_and_long_words() -> None:
    assert table(("a", "b", "c"), [("1", "", ""), ("", "", "")]) == (
        "| a | b | c |\n| --- | --- | --- |\n| 1 | | |\n| | | |"
    )
    assert wrapped(f"{'a' * 119} {'b-b' * 50}") == f"{'a' * 119}\n{'b-b' * 50}"
