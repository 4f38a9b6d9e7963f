"""Text for QAT, calibration and evaluation: documents from a file, blocks of token ids, and the held-out pages.

`.txt` holds documents with a line `<|endoftext|>` between them, `.jsonl` one object a line with a `page` (as lm-eval's
WikiText) or a `text`; either may be packed with xz. A document begins as its tokenizer begins it: models such as Gemma
saw a <bos> at every first position, and predict badly without it. Training cuts `<bos> document <eos> <bos> document
<eos> ...` into blocks which all begin with <bos>. Where the tokenizer adds none, it cuts `<eos> document <eos> document
...`, and lm-eval scores a page after that first <eos>.
"""

import atexit
import importlib.util
import json
import lzma
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from aoquant._messages import progress as progress_bar
from aoquant.integrations import docstrings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Source = Path | str | None
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


def beginning(tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """Return the id of the token with which the tokenizer begins every text, such as <bos>; None where it adds none."""
    (with_it,), (without,) = (tokenizer(["a"], add_special_tokens=add)["input_ids"] for add in (True, False))
    return with_it[0] if len(with_it) > len(without) and with_it[0] != without[0] else None


@dataclass(frozen=True)
class Documents:
    """How token blocks hold documents.

    unscored: the token that begins documents, where it is no token to predict, such as <bos>. separator: the token
    that begins documents, where attention ends at it; None lets documents of a block see one another.
    """

    unscored: int | None = None
    separator: int | None = None

    @classmethod
    def of(cls, tokenizer: "PreTrainedTokenizerBase", *, bos: bool = True, separate: bool = False) -> "Documents":
        """Describe the documents of `token_blocks`, with the same `bos`. separate: no attention across documents."""
        first = beginning(tokenizer) if bos else None
        return cls(first, (tokenizer.eos_token_id if first is None else first) if separate else None)

    def inputs(self, ids_BT: Tensor) -> dict[str, Any]:
        """Return the arguments of a model's forward for token blocks (B, T)."""
        if self.separator is None:
            return {"input_ids": ids_BT}
        # with a cache transformers does not look at position ids
        return {"input_ids": ids_BT, "position_ids": document_positions(ids_BT, self.separator), "use_cache": False}

    def check(self, model: nn.Module) -> None:
        """Raise ValueError where `model` does not separate documents, and should."""
        if self.separator is None:
            return
        ids = torch.tensor([[self.separator, 1, 2, 3, self.separator, 4, 5]], device=next(model.parameters()).device)
        with torch.no_grad():
            apart, alone = model(**self.inputs(ids)).logits[:, 4:], model(input_ids=ids[:, 4:]).logits
            together = model(input_ids=ids).logits[:, 4:]
        if (apart - alone).float().norm() > 0.1 * (together - alone).float().norm():
            raise ValueError(
                f"{type(model).__name__} does not separate the documents of a block by position ids, so tokens see other "
                "documents: leave out --separate-documents"
            )


ONE_TEXT = Documents()  # all tokens are of one text


def token_blocks(
    documents: Sequence[str],
    tokenizer: "PreTrainedTokenizerBase",
    length: int,
    *,
    bos: bool = True,
    progress: bool = True,
) -> Tensor:
    """Token ids of `documents` as blocks (B, length), int64, on the CPU.

    bos: begin each document and each block with the token that the tokenizer begins texts with; <eos> ends a document.
    Otherwise, and where it adds none, <eos> begins each document. The incomplete last block is dropped, and so are
    other special tokens that the tokenizer would add by itself.
    Raises ValueError if no block can be filled.
    """
    if length < 1:
        raise ValueError(f"length must be at least 1 token, got {length}")
    if isinstance(documents, str):
        raise ValueError("documents must be a sequence of strings, got one string; put it in a list")
    first, eos = beginning(tokenizer) if bos else None, tokenizer.eos_token_id
    if first is None and eos is None:
        raise ValueError("tokenizer must have an eos token to put between documents, got none; set tokenizer.eos_token")
    before, after = ([eos], []) if first is None else ([first], [] if eos is None else [eos])
    parts: list[Tensor] = [torch.empty(0, dtype=torch.int64, device="cpu")]
    with progress_bar(len(documents), "tokenize", "document", show=progress) as bar:
        for start in range(0, len(documents), _CHUNK):
            chunk = list(documents[start : start + _CHUNK])
            # verbose=False: a document may well be longer than the model's window, which is what blocks are for.
            found = tokenizer(chunk, add_special_tokens=False, verbose=False)["input_ids"]
            parts += [torch.tensor([*before, *ids, *after], dtype=torch.int64, device="cpu") for ids in found]
            bar.update(len(chunk))
    stream = torch.cat(parts)
    blocks = list(_cut(stream, length, first))
    if not blocks:
        raise ValueError(
            f"documents must fill at least one block of length = {length} tokens, got {len(stream)} tokens "
            f"from {len(documents)} documents; give more text or a smaller length"
        )
    return torch.stack(blocks)


def _cut(stream: Tensor, length: int, first: int | None) -> Iterator[Tensor]:
    """Yield the full blocks of a stream. Where a block begins inside a document, `first` is put in front of it."""
    start = 0
    while True:
        inside = length > 1 and first is not None and start < len(stream) and int(stream[start]) != first
        stop = start + length - inside
        if stop > len(stream):
            return
        block = stream[start:stop]
        yield torch.cat([block.new_tensor([first]), block]) if inside else block
        start = stop


def document_positions(ids_BT: Tensor, first: int) -> Tensor:
    """Return position ids (B, T), int64, that begin again at 0 with each document, and with each block.

    first: the token that begins documents. Given such position ids and no mask, transformers' models attend within a
    document alone.
    """
    at = torch.arange(ids_BT.shape[1], device=ids_BT.device).expand_as(ids_BT)
    return at - torch.where(ids_BT == first, at, 0).cummax(dim=1).values


@cache
def standard_text() -> tuple[Path, Path]:
    """Return files of the standard library's docstrings, trained on and held out, while this process runs."""
    folder = tempfile.TemporaryDirectory(prefix="aoquant-text-")
    atexit.register(folder.cleanup)
    return docstrings.write(Path(folder.name))


def described(path: Path) -> str:
    """Return what a file of text is, for people."""
    own = standard_text() if standard_text.cache_info().currsize else ()  # which parses a hundred modules
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return f"docstrings of Python {version}'s standard library" if path in own else str(path)


def assets() -> Path:
    """The folder of the embedded model: `aoquant.assets` if installed, else eval/assets of a checkout."""
    spec = importlib.util.find_spec("aoquant.assets")
    return (
        Path(next(iter(spec.submodule_search_locations or ())))
        if spec
        else Path(__file__).parents[2] / "eval" / "assets"
    )


def find_pages(wikitext: Source, documents: Source) -> Path | None:
    """Return the file of held-out `{"page": ...}` lines that lm-eval is to score; None for wikitext = "hub".

    wikitext: "hub" or a folder with test.jsonl. documents: a file. Neither: docstrings of the standard library.
    Raises ValueError if there is no such file, or if it holds no page or an empty one, which lm-eval would score as a
    perfect one.
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
        path = standard_text()[1]
        rule = "give wikitext or documents, as the standard library has no docstrings here"
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
