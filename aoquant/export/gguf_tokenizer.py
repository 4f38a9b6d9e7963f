"""A tokenizer.json as GGUF's metadata, so that llama.cpp splits text as training did.

llama.cpp has two tokenizers. "gpt2" is byte-level BPE: tokens, merges and the name of a regular expression that splits
text first, which is found here by the expression itself. "llama" is sentencepiece BPE with byte fallback: tokens and
scores. A token's score orders merges, so it is minus the rank of the merge that makes it. Special tokens, whether they
are added, and the chat template are read by the `gguf` library. Source: llama.cpp `convert_hf_to_gguf.py`,
`src/llama-vocab.cpp`.
"""

import json
import logging
import re
from pathlib import Path
from typing import Any

from gguf import GGUFWriter, SpecialVocab, TokenType

from aoquant._messages import warn

_LOG = logging.getLogger("gguf.vocab")
# a part of the expression that no other model's has -> llama.cpp's name; in this order
_SPLITS = (
    (r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", "tekken"),
    (r"\p{N}{1,3}", "llama-bpe"),
    (r"\p{L}\p{M}", "qwen35"),
    (r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|", "qwen2"),
)


def add(writer: GGUFWriter, folder: Path, vocab_size: int, owner: str) -> None:
    """Write the tokenizer of `folder` (tokenizer.json, tokenizer_config.json) into the metadata.

    vocab_size: rows of the embedding; rows without a token become unused ones. owner: of the tokenizer, for messages.

    Raises:
        ValueError: the folder has no tokenizer.json, or llama.cpp knows no tokenizer like it.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(
            f"gguf: {owner} has no tokenizer.json, and llama.cpp needs a tokenizer: give tokenizer=, a fast one"
        )
    content = json.loads(path.read_text(encoding="utf-8"))
    model = content["model"]
    if model.get("type") != "BPE":
        raise ValueError(
            f"gguf: the tokenizer is {model.get('type')}, and this export knows BPE: tokenizers as Llama, Qwen, Gemma and Mistral have"
        )
    byte_fallback = bool(model.get("byte_fallback"))
    tokens, types = _tokens(content, vocab_size, byte_fallback)
    writer.add_tokenizer_model("llama" if byte_fallback else "gpt2")
    writer.add_tokenizer_pre("default" if byte_fallback else split_name(content.get("pre_tokenizer")))
    writer.add_token_list(tokens)
    if byte_fallback:
        writer.add_token_scores(_scores(model, tokens))
        writer.add_add_space_prefix("Prepend" in json.dumps(content.get("normalizer")))
    writer.add_token_types(types)
    said = _Said()
    _LOG.addFilter(said)
    try:
        SpecialVocab(folder, load_merges=not byte_fallback, n_vocab=vocab_size).add_to_gguf(writer, quiet=True)
    finally:
        _LOG.removeFilter(said)
    for message in said.messages:
        warn(f"gguf: the tokenizer of {owner}: {message}")


class _Said(logging.Filter):
    """Keep what the `gguf` library logs off the terminal, and collect its warnings of a single text.

    Its warnings of TemplateProcessing<pair> are dropped. llama.cpp joins two texts for rerankers alone, and Gemma's
    template, which puts a second <bos> between them, would log one for every export.
    """

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if record.levelno >= logging.WARNING and "TemplateProcessing<pair>" not in message:
            self.messages.append(message)
        return False


def split_name(pre_tokenizer: dict[str, Any] | None) -> str:
    """llama.cpp's name of a byte-level tokenizer's first split.

    Raises:
        ValueError: none is known.
    """
    steps = (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer or {}])
    patterns = [step["pattern"].get("Regex", "") for step in steps if step.get("type") == "Split"]
    if not patterns and any(step.get("type") == "ByteLevel" and step.get("use_regex", True) for step in steps):
        return "gpt-2"
    for pattern in patterns:
        for part, name in _SPLITS:
            if part in pattern:
                return name
    raise ValueError(
        f"gguf: llama.cpp has a name for every way of splitting text, and this one is not known here: {patterns or pre_tokenizer}"
    )


def _tokens(content: dict[str, Any], vocab_size: int, byte_fallback: bool) -> tuple[list[str], list[TokenType]]:
    by_id = {i: token for token, i in content["model"]["vocab"].items()}
    kinds: dict[int, TokenType] = {}
    for added in content.get("added_tokens", []):
        by_id[added["id"]] = added["content"]
        kinds[added["id"]] = TokenType.CONTROL if added.get("special") else TokenType.USER_DEFINED
    unknown = content["model"].get("unk_token")
    tokens, types = [], []
    for i in range(vocab_size):
        token = by_id.get(i)
        tokens.append(f"[PAD{i}]" if token is None else token)
        if token is None:
            types.append(TokenType.UNUSED)
        elif byte_fallback and re.fullmatch(r"<0x[0-9A-F]{2}>", token):
            types.append(TokenType.BYTE)
        elif byte_fallback and token == unknown:
            types.append(TokenType.UNKNOWN)
        else:
            types.append(kinds.get(i, TokenType.NORMAL))
    return tokens, types


def _scores(model: dict[str, Any], tokens: list[str]) -> list[float]:
    """Return minus the rank of the merge that makes each token; tokens that no merge makes come last."""
    merges = [m.split(" ", 1) if isinstance(m, str) else m for m in model["merges"]]
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(merges):
        ranks.setdefault(left + right, rank)
    return [-float(ranks.get(token, len(merges))) for token in tokens]
