"""The encoded text of `pretrain.py` in a folder, so that it is made once.

A tokenizer takes longer to train, and a few hundred megabytes of text to encode, than a small model to start; runs that
share a machine share the folder. The first run that comes fills it while the others wait at its lock. `corpus.json`
says what the ids were made from, and a run with other text (none where there is some too) or another vocabulary is
refused.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from corpus import Corpus, Sources, prepare, read_documents
from overlap import overlap
from transformers import PreTrainedTokenizerFast


def encoded(sources: Sources, held_out: tuple[Path, ...], folder: Path, device: str) -> tuple[Corpus, dict[str, Any]]:
    """The corpus on `device`, and what the log states of it, with the sha256 of every text and of the tokenizer; from
    `folder`, or made and written there.

    Raises:
        ValueError: the folder holds the ids of something else.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        about, ids = folder / "corpus.json", folder / "ids.pt"
        if not about.exists():
            data = prepare(sources, folder / "tokenizer", "cpu")
            stored = {"ids": data.ids.to(torch.uint16), "validation": data.validation.to(torch.uint16)}
            torch.save({**stored, "main": data.main, "validation_bytes": data.validation_bytes}, ids)
            facts: dict[str, Any] = {"tokens_in_text": data.main, "tokens_in_anneal": len(data.ids) - data.main}
            if held_out:
                trained = read_documents(sources.text) + read_documents(sources.anneal)
                facts["overlap_with_held_out"] = asdict(overlap(trained, read_documents(held_out)))
            made_from = {**_files(sources, held_out), **_tokenizer(sources, _hash(folder / "tokenizer"))}
            about.write_text(json.dumps({"made_from": made_from, "facts": facts}, indent=1) + "\n")
    found = json.loads(about.read_text())
    wanted = _files(sources, held_out)
    if not held_out:  # is only measured against
        del wanted["held_out"]
    if sources.tokenizer is None:
        wanted |= {"vocab": sources.vocab, "tokenizer_bytes": sources.tokenizer_bytes}
    else:
        wanted["tokenizer"] = _hash(sources.tokenizer)
    changed = [key for key, value in wanted.items() if found["made_from"].get(key) != value]
    if changed:
        raise ValueError(f"corpus must be a folder made from this run's text; {folder} differs in {', '.join(changed)}")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")
    tokenizer.model_max_length = sources.window
    kept = torch.load(ids, weights_only=True)
    text, validation = (kept[name].int().to(device) for name in ("ids", "validation"))
    return Corpus(tokenizer, text, kept["main"], validation, kept["validation_bytes"]), {
        **found["facts"],
        "made_from": found["made_from"],
    }


def _files(sources: Sources, held_out: tuple[Path, ...]) -> dict[str, Any]:
    """The contents of all files, hashed."""
    named = {"text": sources.text, "anneal": sources.anneal, "validation": sources.validation, "held_out": held_out}
    return {name: [hashlib.sha256(p.read_bytes()).hexdigest() for p in paths] for name, paths in named.items()}


def _tokenizer(sources: Sources, tokenizer: str) -> dict[str, Any]:
    """The hash of the tokenizer, and what it was trained with, if it was."""
    trained = sources.tokenizer is None
    return {
        "tokenizer": tokenizer,
        "vocab": sources.vocab if trained else None,
        "tokenizer_bytes": sources.tokenizer_bytes if trained else None,
    }


def _hash(tokenizer: Path) -> str:
    return hashlib.sha256((tokenizer / "tokenizer.json").read_bytes()).hexdigest()
