"""The docstrings of installed packages as a training text, a document for each module: what the demo model learnt.

    python eval/package_docs.py --out package_docs.txt.xz [--site-packages DIR ...]

Modules of tests and vendored copies are left out, and so is every document that shares a run of words (overlap.py) with
the standard library's modules that `aoquant run` trains and scores on. A docstring that was seen before is dropped.
"""

import argparse
import lzma
import re
import site
import warnings
from pathlib import Path

from corpus import SEPARATOR
from overlap import RUN

from aoquant.integrations.docstrings import HELD_OUT, TRAIN, docstrings, sources

LEAST = 400  # characters of a document
LEFT_OUT = ("test", "tests", "testing", "_vendor", "_vendored", "externals", "aoquant")


def runs(text: str) -> set[tuple[str, ...]]:
    """Return the runs of words in a text, as overlap.py counts them."""
    words = re.findall(r"\w+", text.lower())
    return set(zip(*(words[at:] for at in range(RUN)), strict=False))


def collect(folders: list[Path]) -> list[str]:
    """Return the documents, in the order of the files' paths."""
    own = set().union(*(runs(docstrings(source)) for source in sources((*TRAIN, *HELD_OUT))))
    seen: set[str] = set()
    documents = []
    for file in sorted(file for folder in folders for file in folder.rglob("*.py")):
        if any(part in LEFT_OUT or part.startswith("test_") for part in file.parts):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                text = docstrings(file.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError, ValueError, RecursionError):
            continue  # a template, or Python 2
        parts = [part for part in text.split("\n\n") if len(part) < 40 or part not in seen]
        seen.update(parts)
        if len(document := "\n\n".join(parts)) >= LEAST:
            documents.append(document)
    return [document for document in documents if own.isdisjoint(runs(document))]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--site-packages", type=Path, nargs="+", default=[Path(p) for p in site.getsitepackages()])
    given = parser.parse_args()
    pages = collect(given.site_packages)
    with lzma.open(given.out, "wt", encoding="utf-8") as out:
        out.write(SEPARATOR.join(pages))
    print(f"{len(pages)} documents, {sum(map(len, pages)) / 1e6:.1f} M characters")
