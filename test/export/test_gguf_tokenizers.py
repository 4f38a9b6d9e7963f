"""Tokenizers in GGUF files: tokens, types, scores and merges, and the names by which llama.cpp splits text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from support.export_cases import byte_level, converted
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from aoquant import AoquantWarning, PackedWeightConfig, export
from aoquant.export import gguf_tokenizer


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """A BPE with byte fallback, as Llama 2, Gemma and the first Mistral have."""
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz,12"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(64)), *letters, "th", "the", "▁the"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the")]
    made = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges, unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])  # type: ignore[assignment]
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def test_tokenizers(tmp_path: Path) -> None:
    model = converted(PackedWeightConfig("q4_0"))
    for name, tokenizer in (("bytes", byte_level()), ("pieces", sentencepiece_like())):
        path = export(model, tmp_path / name, "gguf", tokenizer)
        fields = gguf.GGUFReader(path).fields
        tokens = fields["tokenizer.ggml.tokens"].contents()
        assert len(tokens) == 128 and all(tokens[i] == t for t, i in tokenizer.get_vocab().items())
        if name == "bytes":
            assert [fields[f"tokenizer.ggml.{key}"].contents() for key in ("model", "pre")] == ["gpt2", "gpt-2"]
            assert fields["tokenizer.ggml.merges"].contents() == ["t h", "th e", "Ġ q"]
            assert "messages" in fields["tokenizer.chat_template"].contents()
            again = AutoTokenizer.from_pretrained(tmp_path / name, gguf_file="model.gguf")
            ids = [t.encode("the q", add_special_tokens=False) for t in (again, tokenizer)]
            assert ids[0] == ids[1]
        else:
            assert fields["tokenizer.ggml.model"].contents() == "llama"
            scores = dict(zip(tokens, fields["tokenizer.ggml.scores"].contents(), strict=True))
            assert scores["th"] > scores["the"] > scores["▁the"] > scores["a"]
            types = dict(zip(tokens, fields["tokenizer.ggml.token_type"].contents(), strict=True))
            assert (types["<unk>"], types["<s>"], types["<0x00>"], types["a"]) == (2, 3, 6, 1)
            assert fields["tokenizer.ggml.add_space_prefix"].contents() is True


@pytest.mark.parametrize(
    ("regex", "name"),
    [
        (r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+", "llama-bpe"),
        (r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+", "qwen2"),
        (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*|\p{N}{1,3}", "tekken"),
        (r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+", "qwen35"),
    ],
)
def test_the_split_names_the_tokenizer(regex: str, name: str) -> None:
    split = {"type": "Split", "pattern": {"Regex": regex}}
    steps = [split, {"type": "ByteLevel", "use_regex": False}]
    assert gguf_tokenizer.split_name({"type": "Sequence", "pretokenizers": steps}) == name
    with pytest.raises(ValueError, match="not known here"):
        gguf_tokenizer.split_name({"type": "Split", "pattern": {"Regex": r"\d+"}})


@pytest.mark.parametrize(
    "steps",
    [
        [{"type": "ByteLevel", "use_regex": False}],
        [{"type": "Whitespace"}],
        [],
        None,
        [{"type": "Split", "pattern": {"String": " "}}, {"type": "ByteLevel", "use_regex": True}],
    ],
)
def test_a_split_without_a_name_is_refused(steps: Any) -> None:
    with pytest.raises(ValueError, match="not known here"):
        gguf_tokenizer.split_name(None if steps is None else {"type": "Sequence", "pretokenizers": steps})
    sequence = [{"type": "Digits"}, {"type": "ByteLevel"}]
    assert gguf_tokenizer.split_name({"type": "Sequence", "pretokenizers": sequence}) == "gpt-2"


CONTROL, USER_DEFINED, UNUSED, NORMAL = 3, 4, 5, 1


def written(content: dict[str, Any], size: int, folder: Path) -> dict[str, Any]:
    """The keys of a file whose tokenizer.json is `content`."""
    (folder / "tokenizer.json").write_text(json.dumps(content))
    writer = gguf.GGUFWriter(None, "llama")
    gguf_tokenizer.add(writer, folder, size, "a test")
    return {name.removeprefix("tokenizer.ggml."): v.value for name, v in writer.kv_data[0].items()}


def test_added_tokens_and_rows_without_a_token_have_types_of_their_own(tmp_path: Path) -> None:
    added = [{"id": 4, "content": "<tool>", "special": False}, {"id": 5, "content": "<end>", "special": True}]
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "<0x00>": 3}, "merges": ["a b"], "unk_token": "b"}
    level = {"type": "ByteLevel", "use_regex": True}
    keys = written({"model": model, "added_tokens": added, "pre_tokenizer": level}, 8, tmp_path)
    assert keys["tokens"] == ["a", "b", "ab", "<0x00>", "<tool>", "<end>", "[PAD6]", "[PAD7]"]
    assert keys["token_type"] == [NORMAL] * 4 + [USER_DEFINED, CONTROL, UNUSED, UNUSED]
    assert keys["merges"] == ["a b"] and "scores" not in keys and "add_space_prefix" not in keys


@pytest.mark.parametrize("merges", [["a b", "ab a", "a ba", "b b"], [["a", "b"], ["ab", "a"], ["a", "ba"], ["b", "b"]]])
def test_scores_are_the_ranks_of_merges(merges: Any, tmp_path: Path) -> None:
    """A token that several merges make has the rank of the first; one that no merge makes comes last."""
    vocab = {"a": 0, "b": 1, "ab": 2, "aba": 3, "ba": 4, "bb": 5}
    model = {"type": "BPE", "byte_fallback": True, "vocab": vocab, "merges": merges}
    keys = written({"model": model, "normalizer": {"type": "Replace"}}, 6, tmp_path)
    a, b, ab, aba, ba, bb = keys["scores"]
    assert (ab, aba, bb) == (0.0, -1.0, -3.0) and a == b == ba < bb and keys["add_space_prefix"] is False
    assert (keys["model"], keys["pre"]) == ("llama", "default") and "merges" not in keys


PAIR = [
    {"SpecialToken": {"id": "<s>"}},
    {"Sequence": {"id": "A"}},
    {"SpecialToken": {"id": "<s>"}},
    {"Sequence": {"id": "B"}},
]


@pytest.mark.parametrize("first", ["<s>", "<cls>"])
def test_a_template_of_pairs_says_nothing_and_one_of_texts_warns(
    first: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    """Gemma's tokenizer puts <bos> between two texts, which the gguf library takes for a separator that it misses."""
    vocab = {"a": 0, "b": 1, "ab": 2, "<s>": 3, "<cls>": 4}
    model = {"type": "BPE", "byte_fallback": True, "vocab": vocab, "merges": ["a b"]}
    single = [{"SpecialToken": {"id": first}}, {"Sequence": {"id": "A"}}]
    template = {"type": "TemplateProcessing", "single": single, "pair": PAIR}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "b"}))
    keys = written({"model": model, "post_processor": template}, 5, tmp_path)
    assert keys["add_bos_token"] is (first == "<s>")
    assert capfd.readouterr().err == ""
    said = [str(w.message) for w in recwarn if issubclass(w.category, AoquantWarning)]
    if first == "<s>":
        assert said == []
    else:
        assert len(said) == 1 and said[0].startswith(
            "gguf: the tokenizer of a test: Unknown leading special token '<cls>'"
        )


@pytest.mark.parametrize("content", [{"type": "Unigram"}, {}])
def test_other_kinds_of_tokenizers_are_refused(content: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="BPE"):
        written({"model": content}, 4, tmp_path)
