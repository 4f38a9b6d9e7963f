"""Token files: text as int32 ids, so that a machine without the tokenizer or the text can train and score.

    python eval/real_models/tokens.py --model DIR --wikitext DIR --train mix.txt.xz --out gemma.safetensors
    python eval/real_models/tokens.py --model DIR --wikitext DIR --sentences --out minilm.safetensors

One safetensors file holds several texts. A text `t` is `t.ids`, all pages one after the other without special tokens,
with `t.lengths` (tokens) and `t.words` of each page, both int64. Pages of WikiText-2 are detokenised as lm-eval does,
and their words are counted before that, as lm-eval counts them.

`train` has the documents of --train, by default WikiText-2's training pages, shuffled. `wikitext` and `validation` are
WikiText-2's test and validation pages. `other` is text of another kind: docstrings and licences of packages that are
installed here. The file's metadata names the packages and their versions.

--sentences is for embedding models: `train` and `test` hold sentences of WikiText-2's training and test pages.
"""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import importlib.util
import json
import random
import re
from pathlib import Path

import torch
from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from aoquant.integrations.text import load_documents, read_jsonl

PACKAGES = ("numpy", "scipy", "sympy", "torch", "transformers", "matplotlib")  # whose docstrings are `other`
LICENCES = 20  # different ones
WORDS = 40_000  # of `other`, at least
PAGE = 2_000  # words of a page of `other` at most, about


def encoded(
    name: str, pages: list[str], words: list[int], tokenizer: PreTrainedTokenizerBase, special: bool = False
) -> dict[str, Tensor]:
    """Return the tensors of a text. special: keep the special tokens that the tokenizer adds to each page."""
    ids: list[list[int]] = []
    for start in range(0, len(pages), 64):
        part = pages[start : start + 64]
        ids += tokenizer(part, add_special_tokens=special, truncation=special, verbose=False)["input_ids"]
    flat = torch.cat([torch.tensor(page, dtype=torch.int32) for page in ids])
    return {
        f"{name}.ids": flat,
        f"{name}.lengths": torch.tensor([len(page) for page in ids]),
        f"{name}.words": torch.tensor(words),
    }


def wikitext(folder: Path, split: str) -> tuple[list[str], list[int]]:
    """Return the pages of a split as lm-eval feeds them, and their words as lm-eval counts them."""
    pages = read_jsonl(folder / f"{split}.jsonl", ("page",))
    return [wikitext_detokenizer({"page": page}) for page in pages], [words_of(page) for page in pages]


def words_of(page: str) -> int:
    """Count words as lm-eval's wikitext task does."""
    return len(re.split(r"\s+", page))


def docstrings(package: str) -> list[str]:
    """Return the docstrings of each module of an installed package, in the order of its paths; long modules only."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    found = []
    for path in sorted(Path(spec.origin).parent.rglob("*.py")):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
        texts = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds)]
        page = "\n\n".join(dict.fromkeys(text for text in texts if text))
        if words_of(page) >= PAGE // 2:
            found.append(page)
    return found


def licences() -> list[str]:
    """Return the first `LICENCES` different licence texts of the installed packages, by path."""
    found: dict[str, str] = {}
    for distribution in sorted(importlib.metadata.distributions(), key=lambda d: str(d.metadata["Name"]).lower()):
        for file in distribution.files or ():
            if "licen" in file.name.lower() and ".dist-info" in str(file):
                text = Path(str(file.locate())).read_text(encoding="utf-8", errors="ignore")
                found.setdefault(text[:200], text)
    return list(found.values())[:LICENCES]


def other_text() -> tuple[list[str], dict[str, str]]:
    """Return pages of docstrings and licences, and the versions of the packages that the docstrings are from."""
    generator = random.Random(0)
    pages = licences()
    modules = {package: docstrings(package) for package in PACKAGES}
    for found in modules.values():
        generator.shuffle(found)
    while sum(min(PAGE, words_of(page)) for page in pages) < WORDS:
        pages += [found.pop() for found in modules.values() if found]
    return [page[: 6 * PAGE] for page in pages], {package: importlib.metadata.version(package) for package in PACKAGES}


def sentences(pages: list[str]) -> list[str]:
    """Return the sentences of 8 to 40 words, each once."""
    found = (s.strip() for page in pages for line in page.split("\n") for s in re.split(r"(?<=[.!?]) +", line))
    return list(dict.fromkeys(s for s in found if 8 <= words_of(s) <= 40 and s[0].isupper()))


def main() -> None:
    """Write the file that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder with the tokenizer")
    parser.add_argument("--wikitext", type=Path, required=True, help="folder with train, validation and test.jsonl")
    parser.add_argument("--train", type=Path, nargs="*", default=[], help="training text")
    parser.add_argument("--count", type=int, default=6_000_000, help="training tokens at most")
    parser.add_argument("--sentences", action="store_true", help="sentences, for embedding models")
    parser.add_argument("--out", type=Path, required=True)
    o = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(str(o.model), trust_remote_code=False)
    about = {"train": ", ".join(path.name for path in o.train) or "WikiText-2"}
    texts: dict[str, Tensor] = {}
    if o.sentences:
        for name, split, most in (("train", "train", 20_000), ("test", "test", 2_000)):
            found = sentences(wikitext(o.wikitext, split)[0])
            random.Random(0).shuffle(found)
            texts |= encoded(name, found[:most], [words_of(s) for s in found[:most]], tokenizer, special=True)
    else:
        documents = [d for path in o.train for d in load_documents(path)] or wikitext(o.wikitext, "train")[0]
        random.Random(0).shuffle(documents)
        size = count = 0
        while count < len(documents) and size < 4.5 * o.count:  # characters of a token, about
            size, count = size + len(documents[count]), count + 1
        texts |= encoded("train", documents[:count], [words_of(d) for d in documents[:count]], tokenizer)
        for name, split in (("wikitext", "test"), ("validation", "validation")):
            texts |= encoded(name, *wikitext(o.wikitext, split), tokenizer)
        other, versions = other_text()
        texts |= encoded("other", other, [words_of(page) for page in other], tokenizer)
        about["other"] = f"docstrings and licences: {versions}"
    save_file(texts, o.out, {"about": json.dumps(about), "bos": str(tokenizer.bos_token_id)})
    for name in sorted({key.partition(".")[0] for key in texts}):
        lengths, words = texts[f"{name}.lengths"], texts[f"{name}.words"]
        print(f"{name}: {len(lengths)} pages, {int(lengths.sum())} tokens, {int(words.sum())} words")


if __name__ == "__main__":
    main()
