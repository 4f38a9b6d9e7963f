"""Documents in, token blocks out: every layout, every packing, each kind of bad input."""

import json
import lzma
from pathlib import Path
from typing import Any

import pytest
import torch

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

from aoquant.integrations.text import load_documents, token_blocks  # noqa: E402

# A blank line inside, a separator's text inside a line, a line separator that is no newline, and no ASCII.
DOCUMENTS = ["one\n\ntwo", "not <|endoftext|> a separator", "naïve\u2028日本", "end"]
CONTENT = {
    "txt": "\n<|endoftext|>\n".join(DOCUMENTS),
    "txt_final_newline": "\n<|endoftext|>\n".join(DOCUMENTS) + "\n",
    "txt_framed": "<|endoftext|>\n"
    + "\n<|endoftext|>\n".join(DOCUMENTS)
    + "\n<|endoftext|>\n<|endoftext|>\n  \n<|endoftext|>",
    "txt_crlf": "\r\n<|endoftext|>\r\n".join(document.replace("\n", "\r\n") for document in DOCUMENTS),
    "jsonl_page": "".join(json.dumps({"page": document}) + "\n" for document in DOCUMENTS),
    "jsonl_text": "\n".join(json.dumps({"id": 1, "text": document}, ensure_ascii=False) for document in DOCUMENTS),
    "jsonl_blank_lines": "\n\n".join(json.dumps({"text": document}) for document in [*DOCUMENTS, " "]) + "\n\n",
}


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(lzma.compress(content) if path.suffix == ".xz" else content)
    return path


@pytest.mark.parametrize("packing", ["", ".xz"], ids=["plain", "xz"])
@pytest.mark.parametrize("case", CONTENT)
def test_load_documents(tmp_path: Path, case: str, packing: str) -> None:
    path = write(tmp_path / f"text.{case.split('_')[0]}{packing}", CONTENT[case].encode())
    assert load_documents(path) == load_documents(str(path)) == DOCUMENTS


BAD: dict[str, tuple[str, bytes, str]] = {
    "suffix": ("a.csv", b"x", r"path must end in \.txt, \.jsonl, \.txt\.xz or \.jsonl\.xz, got '.*a\.csv'"),
    "xz_alone": ("a.xz", lzma.compress(b"x"), r"path must end in \.txt"),
    "empty_txt": ("a.txt", b"\n<|endoftext|>\n \n", r"must hold at least one document that is not empty, got none"),
    "empty_jsonl": ("a.jsonl", b"\n", r"must hold at least one document that is not empty, got none"),
    "not_utf8": ("a.txt", b"\xff\xfe", r"must be UTF-8 text, got something else"),
    "not_xz": ("a.txt.xz", b"plain", r"must be xz of UTF-8 text, got something else"),
    "cut_xz": ("a.txt.xz", lzma.compress(bytes(1000))[:-20], r"must be xz of UTF-8 text, got something else"),
    "not_json": ("a.jsonl", b'{"text": "a"}\nb\n', r"a\.jsonl, line 2: each line must be a JSON object .* got no JSON"),
    "no_field": (
        "a.jsonl",
        b'{"body": "a"}\n',
        r'line 1: .*\{"page": "\.\.\."\} or \{"text": "\.\.\."\}, got \'\{"body',
    ),
    "null": ("a.jsonl", b'{"text": null}\n', r"line 1: each line must be a JSON object"),
    "list": ("a.jsonl", b'["a"]\n', r"line 1: each line must be a JSON object"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_refused(tmp_path: Path, case: str) -> None:
    name, content, message = BAD[case]
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_documents(path)


@pytest.mark.parametrize("name", ["missing.txt", "missing.jsonl.xz"])
def test_missing_file_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"path must be an existing file, got"):
        load_documents(tmp_path / name)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """One id a word, and a post-processor that adds a bos wherever it is allowed to."""
    vocab = {"<eos>": 0, "<bos>": 1, "a": 2, "b": 3, "c": 4, "d": 5}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<eos>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.post_processor = tokenizers.processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<eos>", bos_token="<bos>", model_max_length=2
    )


def test_token_blocks_are_the_stream_cut(tokenizer: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """eos before each document, no bos, the rest dropped, and no word about documents longer than the window."""
    blocks_BT = token_blocks(["a b c d", "", "b", "c d a"], tokenizer, 5, progress=False)
    assert blocks_BT.dtype == torch.int64
    assert blocks_BT.tolist() == [[0, 2, 3, 4, 5], [0, 0, 3, 0, 4]]
    assert capfd.readouterr() == ("", "")
    assert token_blocks(["a b"], tokenizer, 3).tolist() == [[0, 2, 3]]
    assert "tokenize: 1 of 1 documents" in capfd.readouterr().err  # a line: there is no terminal


def test_token_blocks_over_many_tokenizer_calls(tokenizer: Any) -> None:
    """The order of the documents holds across the chunks that the tokenizer gets."""
    documents = [" ".join("abcd"[(number + i) % 4] for i in range(number % 7)) for number in range(301)]
    stream = [id_ for document in documents for id_ in [0, *("  abcd".index(word) for word in document.split())]]
    blocks_BT = token_blocks(documents, tokenizer, 11, progress=False)
    assert blocks_BT.flatten().tolist() == stream[: len(stream) // 11 * 11]
    assert len(stream) % 11


def test_bad_block_arguments_are_refused(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=r"length must be at least 1 token, got 0"):
        token_blocks(["a"], tokenizer, 0)
    with pytest.raises(ValueError, match=r"at least one block of length = 9 tokens, got 5 tokens from 2 documents"):
        token_blocks(["a b", "c"], tokenizer, 9)
    with pytest.raises(ValueError, match=r"at least one block of length = 9 tokens, got 0 tokens from 0 documents"):
        token_blocks([], tokenizer, 9)
    with pytest.raises(ValueError, match=r"documents must be a sequence of strings, got one string"):
        token_blocks("a b c", tokenizer, 2)
    no_eos = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(ValueError, match=r"tokenizer must have an eos token"):
        token_blocks(["a b c"], no_eos, 2)
