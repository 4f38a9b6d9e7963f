"""Documents in, token blocks out: every layout, every packing, each kind of bad input."""

import json
import lzma
from pathlib import Path
from typing import Any

import pytest
import torch

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

from aoquant.integrations.text import (  # noqa: E402
    Documents,
    beginning,
    document_positions,
    load_documents,
    token_blocks,
)

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
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words("<bos> $A"), eos_token="<eos>", bos_token="<bos>", model_max_length=2
    )


def words(template: str | None) -> Any:
    vocab = {"<eos>": 0, "<bos>": 1, "a": 2, "b": 3, "c": 4, "d": 5}
    found = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<eos>"))
    found.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    if template is not None:
        special = [("<bos>", 1), ("<eos>", 0)]
        found.post_processor = tokenizers.processors.TemplateProcessing(single=template, special_tokens=special)
    return found


def test_token_blocks_are_the_stream_cut(tokenizer: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """bos before each document and each block, eos after each document, the rest dropped, and no word about documents
    longer than the window.
    """
    blocks_BT = token_blocks(["a b c d", "", "b", "c d a"], tokenizer, 5, progress=False)
    assert blocks_BT.dtype == torch.int64
    assert blocks_BT.tolist() == [[1, 2, 3, 4, 5], [1, 0, 1, 0, 1], [1, 3, 0, 1, 4]]
    assert capfd.readouterr() == ("", "")
    assert token_blocks(["a b"], tokenizer, 3).tolist() == [[1, 2, 3]]
    assert "tokenize: 1 of 1 documents" in capfd.readouterr().err  # a line: there is no terminal


def test_token_blocks_without_bos(tokenizer: Any) -> None:
    """eos before each document, as where the tokenizer adds no token by itself."""
    documents = ["a b c d", "", "b", "c d a"]
    wanted = [[0, 2, 3, 4, 5], [0, 0, 3, 0, 4]]
    assert token_blocks(documents, tokenizer, 5, bos=False, progress=False).tolist() == wanted
    assert token_blocks(["a b c d"], tokenizer, 5, bos=False, progress=False).tolist() == wanted[:1]  # no token is over
    assert beginning(tokenizer) == 1
    adds_none = transformers.PreTrainedTokenizerFast(tokenizer_object=words(None), eos_token="<eos>", bos_token="<bos>")
    assert token_blocks(documents, adds_none, 5, progress=False).tolist() == wanted
    assert beginning(adds_none) is None
    adds_eos = transformers.PreTrainedTokenizerFast(tokenizer_object=words("$A <eos>"), eos_token="<eos>")
    assert beginning(adds_eos) is None


def test_token_blocks_over_many_tokenizer_calls(tokenizer: Any) -> None:
    """The order of the documents holds across the chunks that the tokenizer gets."""
    documents = [" ".join("abcd"[(number + i) % 4] for i in range(number % 7)) for number in range(301)]
    stream = [id_ for document in documents for id_ in [0, *("  abcd".index(word) for word in document.split())]]
    blocks_BT = token_blocks(documents, tokenizer, 11, bos=False, progress=False)
    assert blocks_BT.flatten().tolist() == stream[: len(stream) // 11 * 11]
    assert len(stream) % 11
    found = token_blocks(documents, tokenizer, 11, progress=False)
    assert (found[:, 0] == 1).all()
    text = [id_ for row in found.tolist() for id_ in row if id_ > 1]
    assert text == [id_ for id_ in stream if id_ > 1][: len(text)]


def test_documents_that_are_separate_see_themselves_alone(tokenizer: Any) -> None:
    """Each gets the logits that it has alone, at the start of a block and inside; a model that cannot is refused."""
    config = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=8, initializer_range=0.3, **config))
    layout = Documents.of(tokenizer, separate=True)
    ids = torch.tensor([[1, 2, 3, 0, 1, 4, 5, 0], [1, 5, 4, 3, 2, 2, 0, 1]])
    with torch.no_grad():
        found = model(**layout.inputs(ids)).logits
        for row, start, stop in ((0, 0, 4), (0, 4, 8), (1, 0, 7), (1, 7, 8)):
            alone = model(input_ids=ids[row : row + 1, start:stop]).logits[0]
            torch.testing.assert_close(found[row, start:stop], alone, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(model(input_ids=ids).logits[0, 5], found[0, 5], atol=1e-3)
    layout.check(model)
    recurrent = transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=8, hidden_size=16, num_hidden_layers=1, initializer_range=0.3)
    )
    with pytest.raises(ValueError, match="MambaForCausalLM"):
        layout.check(recurrent)
    Documents.of(tokenizer).check(recurrent)
    assert Documents.of(tokenizer).inputs(ids).keys() == {"input_ids"}


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
    no_eos = transformers.PreTrainedTokenizerFast(tokenizer_object=words(None))
    for name, given in (
        ("length", (["a"], tokenizer, 0)),
        ("length", (["a b", "c"], tokenizer, 9)),
        ("length", ([], tokenizer, 9)),
        ("documents", ("a b c", tokenizer, 2)),
        ("tokenizer", (["a b c"], no_eos, 2)),
    ):
        with pytest.raises(ValueError, match=name):
            token_blocks(*given)


@pytest.mark.parametrize(("bos", "separate"), [(True, True), (True, False), (False, True), (False, False)])
def test_documents_begin_as_the_tokenizer_begins_them(bos: bool, separate: bool, tokenizer: Any) -> None:
    found = Documents.of(tokenizer, bos=bos, separate=separate)
    first = 1 if bos else None  # <bos>; without it <eos> stands between documents, and is predicted
    assert (found.unscored, found.separator) == (first, (first or 0) if separate else None)


def test_positions_begin_again_with_each_document_and_block() -> None:
    ids = torch.tensor([[1, 5, 1, 1, 6, 7], [5, 6, 7, 1, 5, 6]])
    assert document_positions(ids, 1).tolist() == [[0, 1, 0, 0, 1, 2], [0, 1, 2, 0, 1, 2]]
