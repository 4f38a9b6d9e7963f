"""Words and numbers that several parts of the library print: lists cut short, and bars of progress."""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest

from aoquant import _messages
from aoquant._messages import folded, listed, one_line, refuse, some, track


@pytest.mark.parametrize("items", [["a", "b", "c"], iter("abc")], ids=["sized", "not sized"])
def test_each_item_is_counted(
    items: Iterable[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_messages, "SECONDS", 0.0)
    sized = isinstance(items, list)
    assert list(track(items, "measure", "batch", lines=True)) == ["a", "b", "c"]
    lines = capsys.readouterr().err.splitlines()
    counts = re.findall(r"^measure: (\d) of (\d)", "\n".join(lines), re.MULTILINE)
    assert counts == [(str(n), "3" if sized else "0") for n in (1, 2, 3)]
    assert [re.findall(r"(\d+) %", line) for line in lines] == ([["33"], ["67"], ["100"]] if sized else [[], [], []])


def test_an_update_within_seconds_of_a_line_writes_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(track(range(5), "measure", lines=True)) == [0, 1, 2, 3, 4]
    assert [line.split(",")[0] for line in capsys.readouterr().err.splitlines()] == [
        "measure: 1 of 5 layers",
        "measure: 5 of 5 layers",
    ]


def test_lists_are_cut_where_they_are_long() -> None:
    names = [f"layer{i}" for i in range(6)]
    assert some(names[:3]) == "layer0, layer1, layer2" and some(names[:4]).endswith("layer2 and 1 more")
    assert some(names, 6).endswith("layer5") and some([]) == ""
    shown = _messages.SHOWN
    lines = [f"{chr(97 + i)}: wrong" for i in range(shown + 2)]
    assert listed(lines[:shown]) == "".join(f"\n  {line}" for line in lines[:shown])
    assert listed(lines).splitlines()[1:] == [*(f"  {line}" for line in lines[:shown]), "  and 2 more"]


def test_lines_of_alike_layers_are_folded() -> None:
    lines = ["a.0.b: wrong", "a.1.b: wrong", "a.0.c: wrong"]
    assert folded(lines) == ["a.*.b: wrong (2 layers)", "a.0.c: wrong"]


def test_problems_are_refused_together() -> None:
    refuse({})
    with pytest.raises(ValueError, match=r"(?s)^2 layer\(s\).*; nothing was written:\n  a: x\n  b: y$"):
        refuse({"a": "x", "b": "y"}, "nothing was written")


def test_an_error_is_one_line() -> None:
    assert one_line(ValueError("a\n  b ")) == "a b" and one_line(KeyError()) == "KeyError"
