"""Text files to token ids: the data of `pretrain.py`.

Text is UTF-8, or .xz of it, with documents separated by a line `<|endoftext|>`. A byte-level BPE is trained on an
even sample of the documents, then every document is encoded once, as `<|endoftext|> document`: it begins with the
token that lm-eval puts in front of a page. The ids of the whole text lie on the training device, so that a batch is
one gather and no data loader exists.
"""

import lzma
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers
import torch
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from aoquant.integrations.text import load_documents

END = "<|endoftext|>"
SEPARATOR = f"\n{END}\n"


@dataclass(frozen=True)
class Sources:
    """Files to read and how to encode them; `tokenizer` is a saved one to use in place of training one."""

    text: tuple[Path, ...]
    anneal: tuple[Path, ...]
    validation: tuple[Path, ...]
    tokenizer: Path | None
    tokenizer_bytes: int
    vocab: int
    window: int


@dataclass(frozen=True)
class Corpus:
    """Token ids on the device (int32: CUDA has no uint16 gather); `ids` is `main` ids of text, then the anneal text."""

    tokenizer: PreTrainedTokenizerFast
    ids: torch.Tensor
    main: int
    validation: torch.Tensor
    validation_bytes: int


def read_documents(paths: tuple[Path, ...]) -> list[str]:
    """Documents of text files, or of .jsonl as lm-eval's pages are, plain or .xz; empty ones dropped."""
    documents: list[str] = []
    for path in paths:
        if ".jsonl" in path.suffixes:
            documents += load_documents(path)
            continue
        with lzma.open(path, "rt", encoding="utf-8") if path.suffix == ".xz" else path.open(encoding="utf-8") as file:
            documents += [document for document in file.read().split(SEPARATOR) if document.strip()]
    return documents


def train_tokenizer(documents: list[str], vocab: int, limit: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE with `END` as id 0; about `limit` characters, evenly spread, are enough for its statistics."""
    stride = max(1, math.ceil(sum(map(len, documents)) / limit))
    bpe = tokenizers.Tokenizer(BPE())
    bpe.pre_tokenizer = ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    alphabet = ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(documents[::stride], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=END, eos_token=END, pad_token=END)


def encode(tokenizer: PreTrainedTokenizerFast, documents: list[str], name: str) -> torch.Tensor:
    """All documents as one uint16 stream, `END` before each."""
    bpe, end = tokenizer.backend_tokenizer, [tokenizer.bos_token_id]
    parts: list[np.ndarray] = []
    for start in tqdm(range(0, len(documents), 512), desc=f"encode {name}", unit="x512 documents"):
        for encoding in bpe.encode_batch_fast(documents[start : start + 512], add_special_tokens=False):
            parts.append(np.array(end + encoding.ids, dtype=np.uint16))
    return torch.from_numpy(np.concatenate(parts) if parts else np.zeros(0, np.uint16))


def prepare(sources: Sources, save_to: Path, device: str) -> Corpus:
    """Read, train or load the tokenizer, save it, encode. ValueError for a text shorter than a window."""
    texts = {name: read_documents(getattr(sources, name)) for name in ("text", "anneal", "validation")}
    if sources.tokenizer is not None:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(sources.tokenizer)
    else:
        tokenizer = train_tokenizer(texts["text"], sources.vocab, sources.tokenizer_bytes)
    if len(tokenizer) > sources.vocab:
        raise ValueError(f"vocab must be at least the tokenizer's {len(tokenizer)}, got {sources.vocab}")
    tokenizer.model_max_length = sources.window
    tokenizer.save_pretrained(save_to)
    streams = {name: encode(tokenizer, documents, name) for name, documents in texts.items()}
    for name, stream in streams.items():
        if len(stream) <= sources.window and getattr(sources, name):
            raise ValueError(f"{name} must hold more than window = {sources.window} tokens, got {len(stream)}")
    ids = torch.cat([streams["text"], streams["anneal"]]).int().to(device)
    size = sum(len(document.encode()) for document in texts["validation"])
    return Corpus(tokenizer, ids, len(streams["text"]), streams["validation"].int().to(device), size)
