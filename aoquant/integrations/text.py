"""Text for QAT, calibration and evaluation: documents from a file, blocks of token ids, and the held-out pages.

`.txt` holds documents with a line `<|endoftext|>` between them, `.jsonl` one object a line with a `page` (as lm-eval's
WikiText) or a `text`; either may be packed with xz. Training cuts the stream `<eos> document <eos> document ...` into
blocks, nothing padded or masked; lm-eval scores a page after just that first <eos>.
"""

from __future__ import annotations

import importlib.util
import json
import lzma
import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from aoquant.integrations.progress_lines import progress as progress_bar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

Source = Path | str | None
EMBEDDED = "heldout.jsonl"  # in the package aoquant.assets: the held-out pages when none are named
END_OF_TEXT = "<|endoftext|>"
_SEPARATOR = re.compile(rf"^{re.escape(END_OF_TEXT)}$\n?", re.MULTILINE)
# Documents in one tokenizer call: enough for its threads, and the Python lists of ids stay small.
_CHUNK = 64


def load_documents(path: Path | str) -> list[str]:
    """Documents of a .txt or .jsonl file, or of such a file packed as .xz, in the file's order.

    Raises ValueError for a missing, damaged, malformed or empty file, with the line where there is one.
    """
    path = Path(path)
    kind = Path(path.name.removesuffix(".xz")).suffix
    if kind == ".txt":
        # The newline before a separator belongs to the separator.
        documents = [document.removesuffix("\n") for document in _SEPARATOR.split(_read(path))]
    elif kind == ".jsonl":
        documents = read_jsonl(path, ("page", "text"))
    else:
        raise ValueError(f"path must end in .txt, .jsonl, .txt.xz or .jsonl.xz, got {str(path)!r}")
    documents = [document for document in documents if document.strip()]
    if not documents:
        raise ValueError(f"{path} must hold at least one document that is not empty, got none")
    return documents


def read_jsonl(path: Path, fields: Sequence[str]) -> list[str]:
    """The first of `fields` that each line's JSON object has; blank lines are skipped, empty strings are kept."""
    wanted = " or ".join(f'{{"{field}": "..."}}' for field in fields)
    documents = []
    # Not splitlines(): JSON leaves U+2028 and its like as they are, inside a string.
    for number, line in enumerate(_read(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path}, line {number}: each line must be a JSON object {wanted}, got no JSON ({error})"
            ) from error
        found = [row[field] for field in fields if field in row] if isinstance(row, dict) else []
        if not found or not isinstance(found[0], str):
            raise ValueError(f"{path}, line {number}: each line must be a JSON object {wanted}, got {line[:80]!r}")
        documents.append(found[0])
    return documents


def token_blocks(
    documents: Sequence[str], tokenizer: PreTrainedTokenizerBase, length: int, *, progress: bool = True
) -> Tensor:
    """Token ids of `<eos> document <eos> document ...` as (B, length) int64 on the CPU.

    The incomplete last block is dropped, and so are special tokens that the tokenizer would add by itself.
    Raises ValueError if no block can be filled.
    """
    if length < 1:
        raise ValueError(f"length must be at least 1 token, got {length}")
    if isinstance(documents, str):
        raise ValueError("documents must be a sequence of strings, got one string; put it in a list")
    if tokenizer.eos_token_id is None:
        raise ValueError("tokenizer must have an eos token to put between documents, got none; set tokenizer.eos_token")
    eos = torch.tensor([tokenizer.eos_token_id], device="cpu")
    parts: list[Tensor] = []
    with progress_bar(len(documents), "tokenize", "document", show=progress) as bar:
        for start in range(0, len(documents), _CHUNK):
            chunk = list(documents[start : start + _CHUNK])
            # verbose=False: a document may well be longer than the model's window, which is what blocks are for.
            for ids in tokenizer(chunk, add_special_tokens=False, verbose=False)["input_ids"]:
                parts += [eos, torch.tensor(ids, dtype=torch.int64, device="cpu")]
            bar.update(len(chunk))
    stream = torch.cat(parts) if parts else eos[:0]
    blocks = len(stream) // length
    if blocks == 0:
        raise ValueError(
            f"documents must fill at least one block of length = {length} tokens, got {len(stream)} tokens "
            f"from {len(documents)} documents; give more text or a smaller length"
        )
    return stream[: blocks * length].view(blocks, length)


def assets() -> Path:
    """The folder of the embedded model and text: `aoquant.assets` if installed, else eval/assets of a checkout."""
    spec = importlib.util.find_spec("aoquant.assets")
    return (
        Path(next(iter(spec.submodule_search_locations or ())))
        if spec
        else Path(__file__).parents[2] / "eval" / "assets"
    )


def find_pages(wikitext: Source, documents: Source) -> Path | None:
    """Return the file of held-out `{"page": ...}` lines that lm-eval is to score; None for wikitext = "hub".

    wikitext: "hub" or a folder with test.jsonl. documents: a file. Neither: the embedded pages. Raises ValueError if
    there is no such file, or if it holds no page or an empty one, which lm-eval would score as a perfect one.
    """
    if wikitext is not None and documents is not None:
        raise ValueError(
            f"give one of wikitext and documents, or neither, got {str(wikitext)!r} and {str(documents)!r}"
        )
    if wikitext == "hub":
        return None
    if wikitext is not None:
        path, rule = Path(wikitext) / "test.jsonl", "wikitext must be 'hub' or a folder that holds test.jsonl"
    elif documents is not None:
        path, rule = Path(documents), 'documents must be an existing file of {"page": ...} lines'
    else:
        path = assets() / EMBEDDED
        rule = f"give wikitext or documents, as the embedded {EMBEDDED} is not installed"
    if not path.is_file():
        raise ValueError(f"{rule}, got {str(path if wikitext is None else wikitext)!r}")
    pages = read_jsonl(path, ("page",))
    empty = sum(not page.strip() for page in pages)
    if not pages or empty:
        raise ValueError(f"{path} must hold at least one page and no empty one, got {len(pages)} pages, {empty} empty")
    return path.resolve()


def _read(path: Path) -> str:
    """All of a UTF-8 file, unpacked if its name ends in .xz, with \\n for every line end."""
    if not path.is_file():
        raise ValueError(f"path must be an existing file, got {str(path)!r}")
    try:
        with lzma.open(path, "rt", encoding="utf-8") if path.suffix == ".xz" else path.open(encoding="utf-8") as file:
            return file.read()
    except (lzma.LZMAError, EOFError, UnicodeDecodeError) as error:
        packed = "xz of UTF-8 text" if path.suffix == ".xz" else "UTF-8 text"
        raise ValueError(f"{path} must be {packed}, got something else or a damaged file ({error})") from error
