"""Serving engines in environments of their own (`make engines`): where they are, and the demo model that they serve."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from aoquant.integrations.text import assets, load_documents, token_blocks

ROOT = Path(__file__).parents[2]
IDS_SHAPE = (8, 256)


def engine_python(name: str) -> Path:
    """The Python of an engine's environment; the test is skipped without one, or fails in `make engine-proofs`."""
    python = Path(os.environ.get("AOQUANT_ENGINES", ROOT / ".engines")).absolute() / name / "bin" / "python"
    if not python.exists():
        if os.environ.get("AOQUANT_REQUIRE_ENGINES"):
            pytest.fail(f"{python} does not exist: make engines")
        pytest.skip(f"{name} is not installed (make engines)")
    return python


def run_in(python: Path, script: str, *arguments: Any, **environment: str) -> str:
    """Run a script of test/engines by an engine's Python; its output."""
    command = [str(python), str(ROOT / "test" / "engines" / script), *map(str, arguments)]
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=inherited | environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout


def demo(dtype: torch.dtype = torch.bfloat16) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The embedded model and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(str(assets()), dtype=dtype).eval()
    return model, AutoTokenizer.from_pretrained(str(assets()))


def heldout(tokenizer: PreTrainedTokenizerBase) -> tuple[torch.Tensor, str]:
    """Token ids of held-out pages, IDS_SHAPE, and a page's text."""
    pages = load_documents(assets() / "heldout.jsonl")
    return token_blocks(pages, tokenizer, IDS_SHAPE[1], progress=False)[: IDS_SHAPE[0]], pages[0][:2000]


@torch.no_grad()
def log_probabilities(model: PreTrainedModel, ids: torch.Tensor) -> np.ndarray:
    """Of every token but the first of each window."""
    rows = [model(window[None]).logits[0, :-1].double().log_softmax(-1) for window in ids]
    return torch.cat([r.gather(1, w[1:, None])[:, 0] for r, w in zip(rows, ids, strict=True)]).numpy()
