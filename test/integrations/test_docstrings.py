"""The text of the demo: parsed and not imported, in the order of the file, and none of it on both sides."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aoquant.integrations import docstrings as d


def test_docstrings_come_in_the_order_of_the_file() -> None:
    source = (
        "\"\"\"A.\"\"\"\nclass B:\n  'B.'\n  def f(self): 'F.'\ndef g(): 1\nasync def h(): 'H.'\nraise SystemExit\n"
    )
    assert d.docstrings(source) == "A.\n\nB.\n\nF.\n\nH."
    with pytest.raises(SyntaxError):
        d.docstrings("print 1")


def test_prose_is_sentences() -> None:
    kept = "Return the first of these, if there is one."
    left = (
        "Too short.",
        "no capital begins this one, nor the next.",
        "Has six words and no stop",
        "A list of things is:\n- a\n- b.",
    )
    assert d.prose("\n\n".join((*left, kept, ">>> Print(1) and some more words here."))) == kept
    assert d.prose("A line that\n  is wrapped and indented goes.\n\nA line that\nis wrapped stays as one.") == (
        "A line that is wrapped stays as one."
    )


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("One two three four five six.", True),
        ("One two three four five.", False),
        ("One two three four five six:", True),
        ("One two three four five six;", False),
        ("One two three four five. six", False),
        ("one two Three four five six.", False),
        ("One two three four\n* five six.", False),
        ("One two three four\n| five six.", False),
        ("\tOne two three four five six.", False),
    ],
)
def test_a_sentence_has_six_words_a_capital_and_a_stop(text: str, kept: bool) -> None:
    assert d.prose(text) == (text if kept else "")


def test_every_module_is_there_and_held_out_text_is_of_other_modules() -> None:
    assert len(set(d.TRAIN) | set(d.HELD_OUT)) == len(d.TRAIN) + len(d.HELD_OUT)
    train, held_out = d.standard_library(d.TRAIN), d.standard_library(d.HELD_OUT)
    assert len(train) > 0.9 * len(d.TRAIN) and len(held_out) > 0.9 * len(d.HELD_OUT)  # a version may lack some
    assert sum(map(len, train)) > 450_000 and sum(map(len, held_out)) > 30_000
    lines = {line for page in train for line in page.split("\n") if len(line) > 60}
    shared = [line for page in held_out for line in page.split("\n") if line in lines]
    assert len(shared) < 0.01 * sum(len(page.split("\n")) for page in held_out)


def test_files_hold_a_page_a_line(tmp_path: Path) -> None:
    train, held_out = d.write(tmp_path / "text")
    for path, modules in ((train, d.TRAIN), (held_out, d.HELD_OUT)):
        pages = [json.loads(line)["page"] for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
        assert pages == d.standard_library(modules) and all(pages)
