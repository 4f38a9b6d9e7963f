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


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", b"x", "path"),
        ("a.xz", lzma.compress(b"x"), "path"),
        ("missing.txt", None, "path"),
        ("a.txt", b"\n<|endoftext|>\n \n", "document"),
        ("a.jsonl", b"\n", "document"),
        ("a.txt", b"\xff\xfe", "UTF-8"),
        ("a.txt.xz", b"plain", "xz"),
        ("a.txt.xz", lzma.compress(bytes(1000))[:-20], "xz"),
        ("a.jsonl", b'{"text": "a"}\nb\n', "line 2"),
        ("a.jsonl", b'{"body": "a"}\n', "line 1"),
        ("a.jsonl", b'{"text": null}\n', "line 1"),
        ("a.jsonl", b'["a"]\n', "line 1"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, name: str, content: bytes | None, said: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=said):
        load_documents(tmp_path / name)


def test_bad_block_arguments_are_refused(tokenizer: Any) -> None:
    no_eos = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    for name, given in (
        ("length", (["a"], tokenizer, 0)),
        ("length", (["a b", "c"], tokenizer, 9)),
        ("length", ([], tokenizer, 9)),
        ("documents", ("a b c", tokenizer, 2)),
        ("tokenizer", (["a b c"], no_eos, 2)),
    ):
        with pytest.raises(ValueError, match=name):
            token_blocks(*given)
