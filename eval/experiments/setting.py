"""What all runs of a table share: models, text, budget, and how a model is scored.

Training text is tokenised once and kept in OUT; so are the validation pages, on which alone learning rates are chosen.
Scores are lm-eval's `wikitext` task over local test pages, every model eager and with the same batch of windows.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import warnings
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer
from safetensors import safe_open
from torch import Tensor
from transformers import AutoTokenizer

from aoquant import AoquantWarning
from aoquant.integrations.job.models import load_float
from aoquant.integrations.lm_eval import Perplexity, evaluate
from aoquant.integrations.text import load_documents, read_jsonl, token_blocks
from experiments.known import BUDGET, budget, known_records, listed
from experiments.records import Records, distinct
from experiments.rows import Row
from experiments.tuning import ATTENTION, Budget, next_token_loss

OPTIONS = {"dense": "--model", "moe": "--moe-model"}  # of the folder of each model
CHARACTERS = 5.5  # of a token at most, for a first guess at how much text is enough


def digest(folder: Path, pattern: str) -> str:
    """Of the files of a folder, the first 12 hexadecimal digits of a sha256."""
    total = hashlib.sha256()
    for file in sorted(folder.glob(pattern)):
        total.update(file.name.encode() + file.read_bytes())
    return total.hexdigest()[:12]


def contents(files: Iterable[Path]) -> str:
    """Of files in this order, whatever they are called, the first 12 hexadecimal digits of a sha256."""
    hashes = [hashlib.sha256(file.read_bytes()).digest() for file in files]
    return hashlib.sha256(b"".join(hashes)).hexdigest()[:12]


class Setting:
    """One model's side of the table: "dense" or "moe"."""

    def __init__(self, o: argparse.Namespace, model: str) -> None:
        """Raises ValueError for a model or text that is not there."""
        self.o, self.model = o, model
        self.folder: Path | None = o.model if model == "dense" else o.moe_model
        if self.folder is None or not self.folder.is_dir():
            raise ValueError(f"{OPTIONS[model]} must be a folder of a {model} model, got {str(self.folder)!r}")
        for name in ("test", "validation"):
            if o.wikitext is None or not (o.wikitext / f"{name}.jsonl").is_file():
                raise ValueError(f"--wikitext must be a folder with {name}.jsonl, got {str(o.wikitext)!r}")
        for file in o.text:
            if not file.is_file():
                raise ValueError(f"--text must be files, got {str(file)!r}")
        runs = o.out / "runs.jsonl"
        self.settings = {
            "model": digest(self.folder, "*.safetensors"),
            "text": digest(o.wikitext, "test.jsonl"),
            "validation": digest(o.wikitext, "validation.jsonl"),
        }
        self.settings |= budget(o, runs, self.settings)
        self.budget = Budget(*(self.settings[name] for name in ("steps", "batch", "block")))
        self.search_steps = self.settings["search_steps"]
        positions = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))["max_position_embeddings"]
        if self.budget.block > positions:
            raise ValueError(
                f"--block must be at most the {positions} positions of {OPTIONS[model]}, got {self.budget.block}"
            )
        self.settings["train"] = contents(o.text) if o.text else self._trained_on(runs)
        self.records = Records(runs, self.settings, o.device, o.commit)

    def _trained_on(self, runs: Path) -> str:
        """The text of the tokens that OUT holds, else of the runs that are there."""
        found = {path.name.split("-")[2] for path in self.o.out.glob(self._tokens("*").name)} or {
            other["train"] for other in distinct(runs, self.settings, ("train",))
        }
        if not found:
            digests = {name: self.settings[name] for name in ("model", "text", "validation")}
            if there := distinct(runs, digests, BUDGET):
                raise ValueError(f"--out {self.o.out} has runs of {listed(there)}: give these, or --text")
            raise ValueError(f"--text is needed: {self.o.out} holds no tokens of an earlier call")
        if len(found) > 1:
            raise ValueError(f"--text is needed: {self.o.out} holds tokens or runs of {len(found)} texts")
        return found.pop()

    @cached_property
    def loaded(self) -> tuple[Any, Any]:
        """(tokenizer, float model in bf16 on the device)."""
        tokenizer, model = load_float(str(self.folder), "bfloat16", self.o.device)
        model.set_attn_implementation(ATTENTION)
        return tokenizer, model

    def parameters(self) -> int:
        """Of the model's files; tied ones once."""
        assert self.folder is not None
        sizes = []
        for path in self.folder.glob("*.safetensors"):
            with safe_open(path, "pt") as file:
                sizes += [math.prod(file.get_slice(name).get_shape()) for name in file.keys()]  # noqa: SIM118
        return sum(sizes)

    def tokenise(self) -> None:
        """Make the token ids, once for all processes."""
        path = self._tokens(self.settings["train"])
        if not path.exists():
            partial = path.with_suffix(f".{self.model}.partial")
            torch.save(self._tokenised(), partial)
            partial.replace(path)

    def _tokens(self, text: str) -> Path:
        assert self.folder is not None
        out: Path = self.o.out
        made_from = f"{digest(self.folder, 'tokenizer.json')}-{text}-{self.settings['validation']}"
        return out / f"corpus-{made_from}-{self.budget.tokens}-{self.budget.block}.pt"

    @cached_property
    def corpus(self) -> dict[str, Tensor]:
        """Token ids, (B, block) each: "train" and "validation"."""
        self.tokenise()
        stored: dict[str, Tensor] = torch.load(self._tokens(self.settings["train"]), weights_only=True)
        return {name: ids.long() for name, ids in stored.items()}

    def _tokenised(self) -> dict[str, Tensor]:
        if not self.o.text:
            raise ValueError(f"--text is needed: {self.o.out} holds no tokens of an earlier call")
        tokenizer = AutoTokenizer.from_pretrained(str(self.folder), trust_remote_code=False)
        documents = [d for path in self.o.text for d in load_documents(path)]
        random.Random(0).shuffle(documents)
        count, size = 0, 0
        while count < len(documents) and size < CHARACTERS * self.budget.tokens:
            size, count = size + len(documents[count]), count + 1
        train = token_blocks(documents[:count], tokenizer, self.budget.block, progress=False)
        pages = read_jsonl(self.o.wikitext / "validation.jsonl", ("page",))
        detokenised = [wikitext_detokenizer({"page": page}) for page in pages]
        validation = token_blocks(detokenised, tokenizer, self.budget.block, progress=False)
        wanted = self.budget.steps * self.budget.batch
        if len(train) < wanted:
            warnings.warn(
                f"--text has {len(train) * self.budget.block} tokens: a run of {self.budget.tokens} passes over it "
                f"{wanted / len(train):.1f} times",
                AoquantWarning,
                stacklevel=2,
            )
        dtype = torch.uint16 if len(tokenizer) <= 2**16 else torch.int32
        return {"train": train[:wanted].to(dtype), "validation": validation.to(dtype)}

    @torch.no_grad()
    def validation_loss(self, model: Any) -> float:
        """Nats a token over the blocks of the validation pages."""
        blocks_BT, nats = self.corpus["validation"].to(self.o.device), 0.0
        for part_BT in blocks_BT.split(self.o.score_batch):
            nats += float(next_token_loss(model(input_ids=part_BT, use_cache=False).logits, part_BT)) * len(part_BT)
        return nats / len(blocks_BT)

    def score(self, model: Any) -> Perplexity:
        """lm-eval's word perplexity on the test pages."""
        tokenizer, _ = self.loaded
        options = {"limit": self.settings["documents"], "batch_size": self.o.score_batch, "progress": False}
        return evaluate(model, tokenizer, wikitext=str(self.o.wikitext), **options)


def scored(p: Perplexity) -> dict[str, Any]:
    """What a line keeps of a score."""
    nats = -sum(p.loglikelihoods)
    assert math.isclose(math.exp(nats / sum(p.words)), p.word_perplexity, rel_tol=1e-6)
    return {"word_perplexity": p.word_perplexity, "window": p.window, "documents": p.documents}


def setting_of(o: argparse.Namespace, row: Row) -> Setting:
    """The setting of a row's model."""
    return Setting(o, row.model)


def settings_of(o: argparse.Namespace, rows: Iterable[Row]) -> dict[str, Setting]:
    """The setting of each model that rows have; made once, as every file of it is hashed."""
    return {model: Setting(o, model) for model in sorted({row.model for row in rows})}


def records_of(o: argparse.Namespace, rows: Iterable[Row]) -> dict[str, tuple[Records, int | None]]:
    """What a table is made of, by model, with its parameters: of the models that are given, or without one of the runs
    in OUT, which know the parameters since they keep them.

    Raises:
        ValueError: OUT holds none, or of several settings.
    """
    if o.model or o.moe_model:
        return {name: (setting.records, setting.parameters()) for name, setting in settings_of(o, rows).items()}
    names: dict[str, list[str]] = {}
    for row in rows:
        names.setdefault(row.model, []).append(row.name)
    found = {model: known_records(o, o.out / "runs.jsonl", of_model) for model, of_model in names.items()}
    if not any(found.values()):
        raise ValueError(f"--out must hold runs.jsonl, got {str(o.out)!r}: give --model to make runs")
    return {model: (records, records.parameters()) for model, records in found.items() if records is not None}
