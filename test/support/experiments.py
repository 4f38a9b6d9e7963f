"""The package eval/experiments for a test, what its command reads, and what it writes."""

from __future__ import annotations

import importlib
import json
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).parents[2]
ROWS = {
    "bf16": 'about = "float"\nkind = "float"\nlosses = ["ce"]\nlearning_rates = [1e-3]\nseeds = 1',
    "int4": 'about = "ours"\nkind = "aoquant"\nrecipe = "intx4-g32/"\nheadline = true\nseeds = 2\nlosses = ["kl"]\n'
    'learning_rates = [1e-3, 3e-3]\nagainst = "theirs"',
    "exported": 'about = "ours"\nkind = "aoquant"\nrecipe = "vllm-w4a16-g32"\nseeds = 2\nlosses = ["kl"]\n'
    "learning_rates = [1e-3]\nexport = true",
    "theirs": 'about = "torchao"\nkind = "torchao"\nrecipe = "intx4-g32"\nseeds = 1\nlosses = ["kl"]\nlearning_rates = [1e-3]',
    "lora": 'about = "LoRA"\nkind = "lora"\nrecipe = "int4-g32"\nseeds = 1\nlosses = ["kl"]\nlearning_rates = [1e-2]',
}


def experiments_modules(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "eval"))
    return importlib.import_module("experiments")


def experiments_inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model/, wikitext/, text.txt and configs/."""
    folder = tmp_path_factory.mktemp("experiments")
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(
        vocab_size=8192, max_position_embeddings=64, tie_word_embeddings=True, initializer_range=0.2, **size
    )
    LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(ROOT / "eval" / "assets").save_pretrained(folder / "model")
    draw, words = random.Random(0), ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "two", "dogs"]
    pages = [" ".join(draw.choices(words, k=60)) for _ in range(40)]
    (folder / "text.txt").write_text("\n<|endoftext|>\n".join(pages))
    (folder / "wikitext").mkdir()
    for name in ("test", "validation"):
        lines = [json.dumps({"page": page}) for page in draw.sample(pages, 3)]
        (folder / "wikitext" / f"{name}.jsonl").write_text("\n".join(lines))
    (folder / "configs").mkdir()
    for name, text in ROWS.items():
        (folder / "configs" / f"{name}.toml").write_text(text)
    return folder


def arguments(inputs: Path, out: Path, *more: str) -> list[str]:
    paths = [
        "--model",
        inputs / "model",
        "--wikitext",
        inputs / "wikitext",
        "--configs",
        inputs / "configs",
        "--out",
        out,
    ]
    budget = ["--tokens", "512", "--batch", "2", "--block", "32", "--device", "cpu", "--score-batch", "4"]
    return [*map(str, paths), "--text", str(inputs / "text.txt"), *budget, *more]


def runs(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "runs.jsonl").read_text().splitlines()]
