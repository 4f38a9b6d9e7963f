"""eval/mix.py: the parts of a mix of pages, in its order."""

from __future__ import annotations

import importlib
import json
import lzma
from pathlib import Path
from types import ModuleType

import pytest
from support import forked
from support.experiments import ROOT, experiments_modules

modules = pytest.fixture(experiments_modules)

RAW = " = A page = \n\n A sentence , with a clause @-@ like part . \n"  # as WikiText is tokenised
PLAIN = " = A page =\n\nA sentence, with a clause-like part.\n"
DOCUMENTS = ["first.\n", "third.\n", f"{PLAIN.strip()}\n", "second.\n"]


def written(folder: Path, *, mix: list[str], small: list[str], pages: list[str]) -> list[str]:
    """The command's arguments."""
    for name, documents in (("mix", mix), ("small", small)):
        (folder / f"{name}.txt").write_text("\n<|endoftext|>\n".join(documents), encoding="utf-8")
    for name in ("train", "validation"):
        lines = "".join(json.dumps({"page": page}) + "\n" for page in pages)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    files = ("--mix", str(folder / "mix.txt"), "--small", str(folder / "small.txt"))
    return [*files, "--wikitext", str(folder), "--out", str(folder / "out")]


def test_the_parts_of_a_mix_are_in_its_order(modules: ModuleType, tmp_path: Path) -> None:
    given = written(tmp_path, mix=DOCUMENTS, small=[DOCUMENTS[2], DOCUMENTS[0]], pages=[RAW])
    done = forked.script(ROOT / "eval" / "mix.py", *given)
    assert done.returncode == 0, done.stderr
    read = importlib.import_module("corpus").read_documents
    found = {path.name: read((path,)) for path in (tmp_path / "out").iterdir()}
    assert found == {
        "train_mix_rest.txt.xz": ["third.\n", "second.\n"],
        "wikitext2_train.txt.xz": [DOCUMENTS[2]],
        "wikitext2_validation.txt.xz": [PLAIN],
    }
    with lzma.open(tmp_path / "out" / "train_mix_rest.txt.xz", "rt", encoding="utf-8") as file:
        assert file.read() == "third.\n\n<|endoftext|>\nsecond.\n"
