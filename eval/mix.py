"""The training files of docs/evidence/experiments.md's model from the mix of pages that they are parts of.

    python eval/mix.py --mix train_mix.txt.xz --small train_mix_small.txt.xz --wikitext DIR --out DIR

`train_mix_rest.txt.xz`: the documents of the mix that the small mix lacks, in the mix's order, so that small and rest
are read as all of it. `wikitext2_train.txt.xz`: those of the mix's documents that are WikiText-2's training pages, in
the mix's order, to anneal on. `wikitext2_validation.txt.xz`: its validation pages, detokenised as lm-eval does it.

--wikitext holds WikiText-2 as lm-eval's `train.jsonl` and `validation.jsonl`, a page a line. Windows of training text
are drawn by their place in the whole, so the order of documents is part of what makes a model.
"""

import argparse
import lzma
import sys
from pathlib import Path

from corpus import SEPARATOR, read_documents
from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

from aoquant.integrations.text import read_jsonl


def parts(mix: Path, small: Path, wikitext: Path) -> dict[str, list[str]]:
    """Documents by the name of their file.

    Raises:
        ValueError: the small mix has a document, or WikiText-2 a training page, that the mix lacks.
    """
    documents, of_small = read_documents((mix,)), set(read_documents((small,)))
    if lost := len(of_small - set(documents)):
        raise ValueError(f"--small must hold documents of --mix alone, got {lost} others")
    pages = {page.strip() for page in _detokenised(wikitext / "train.jsonl")}
    training = [document for document in documents if document.strip() in pages]
    if lost := len(pages) - len({document.strip() for document in training}):
        raise ValueError(f"--mix must hold all training pages of --wikitext, {lost} are missing")
    return {
        "train_mix_rest": [document for document in documents if document not in of_small],
        "wikitext2_train": training,
        "wikitext2_validation": _detokenised(wikitext / "validation.jsonl"),
    }


def _detokenised(file: Path) -> list[str]:
    return [wikitext_detokenizer({"page": page}) for page in read_jsonl(file, ("page",))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("mix", "small", "wikitext", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    o = parser.parse_args()
    o.out.mkdir(parents=True, exist_ok=True)
    for name, documents in parts(o.mix, o.small, o.wikitext).items():
        with lzma.open(o.out / f"{name}.txt.xz", "wt", encoding="utf-8") as file:
            file.write(SEPARATOR.join(documents))


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:  # what a user can mend is one line
        sys.exit(f"mix.py: {error}")
