"""benchmarks/moe_page.py: docs/evidence/results.md's table of experts is what the measured rows say."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def moe_page(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("moe_page")


def test_the_table_in_the_docs_is_of_the_file(moe_page: ModuleType) -> None:
    written = moe_page.page(moe_page.read(moe_page.RESULTS / "moe.csv"))
    text = (ROOT / "docs" / "evidence" / "results.md").read_text(encoding="utf-8")
    assert f"<!-- moe -->\n\n{written}\n\n<!-- end of moe -->" in text


def test_a_cell_is_the_newest_measured_row(moe_page: ModuleType) -> None:
    rows = list(moe_page.read(moe_page.RESULTS / "moe.csv"))
    cell = {"shape": "mixtral", "part": "decode", "what": "products", "tokens": "4096", "variant": moe_page.RECIPE}
    last = moe_page.newest(rows, **cell)
    assert last is not None
    newer, failed = ({**last, "date": "2099-01-01", "speed": "7.126", "ms": ms} for ms in ("1", ""))
    assert "7.13" in moe_page.page([*rows, newer]) and "2099-01-01" in moe_page.page([*rows, newer])
    assert moe_page.page([*rows, failed]) == moe_page.page(rows)  # a run that failed has no ms
    with pytest.raises(ValueError, match=r"no measured row with .*mixtral"):
        moe_page.page([row for row in rows if row["shape"] != "mixtral"])
