"""What is checked of a row once under each loss, on the first model trained on the whole budget: is the deployed model
the trained one, wherever it is made and read? `verdicts.py` says what must hold.

- every layer of the converted model equals the prepared one's, bit for bit (`aoquant.verify`);
- the trained weights converted on a CPU have the same codes and scales, and the first documents nearly the same score
  (sums run in another order there);
- where a compressed-tensors scheme holds the row, the exported folder is scored by lm-eval's own command line in a
  process that has never heard of aoquant.
"""

from __future__ import annotations

import copy
import json
import math
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from aoquant import QATConfig, export, quantize_, verify
from aoquant.integrations.lm_eval import evaluate, write_task
from experiments.rows import Row
from experiments.setting import Setting

CPU_DOCUMENTS = 1


def checks(setting: Setting, row: Row, prepared: Any, converted: Any) -> dict[str, Any]:
    """The results by name; a check that fails, or lacks a package, is a value, not a stop: other rows go on."""
    result: dict[str, Any] = {}
    batch = {"input_ids": setting.corpus["train"][:4].to(setting.o.device)}
    try:
        result["min_sqnr_db"] = str(verify(prepared, converted, batch).min_sqnr)
    except ValueError as error:
        result["min_sqnr_db"] = str(error).splitlines()[0]
    if torch.device(setting.o.device).type != "cpu":
        result |= _on_a_cpu(setting, prepared, converted)
    if row.export:
        try:
            result["transformers_word_perplexity"] = _by_transformers_alone(setting, converted)
        except ImportError as error:
            result["not_exported"] = str(error)
    return result


def _on_a_cpu(setting: Setting, prepared: Any, converted: Any) -> dict[str, Any]:
    model = copy.deepcopy(prepared).cpu()
    quantize_(model, QATConfig(step="convert"))
    here, there = stored(model), stored(converted)
    equal = here.keys() == there.keys() and all(torch.equal(here[name], there[name]) for name in here)
    tokenizer, _ = setting.loaded
    options: Any = {"wikitext": str(setting.o.wikitext), "limit": CPU_DOCUMENTS, "progress": False}
    nats = [
        -sum(p.loglikelihoods) / sum(p.words) for p in (evaluate(m, tokenizer, **options) for m in (model, converted))
    ]
    return {"cpu_codes_equal": equal, "cpu_nats_a_word": abs(nats[0] - nats[1])}


def stored(model: nn.Module) -> dict[str, Tensor]:
    """The bytes of every parameter, packed ones by their parts, on the CPU."""
    found: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        parts = {n: getattr(p, n) for n in p.__tensor_flatten__()[0]} if hasattr(p, "__tensor_flatten__") else {"": p}
        for part, t in parts.items():
            if isinstance(t, Tensor):
                found[f"{name}.{part}"] = t.detach().contiguous().reshape(-1).cpu().view(torch.uint8)
    return found


def _by_transformers_alone(setting: Setting, converted: Any) -> float | str:
    """Word perplexity of the exported folder by lm-eval's command line; the error's last line when it fails.

    Raises:
        ImportError: a package that exports is not here.
    """
    o, (tokenizer, model) = setting.o, setting.loaded
    with tempfile.TemporaryDirectory() as scratch:
        folder, tasks = Path(scratch) / "exported", Path(scratch) / "tasks"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an engine whose activations differ is not what scores here
            export(converted, folder, "compressed-tensors", tokenizer)
        write_task(tasks, wikitext=str(o.wikitext))
        window = model.config.max_position_embeddings
        arguments = f"pretrained={folder},max_length={window},softmax_dtype=float32,dtype=bfloat16"
        command = [sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--model_args", arguments]
        command += ["--tasks", "wikitext_local", "--include_path", str(tasks), "--device", o.device]
        command += ["--batch_size", str(o.score_batch), "--output_path", str(Path(scratch) / "results")]
        command += ["--limit", str(documents)] if (documents := setting.settings["documents"]) else []
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        files = list((Path(scratch) / "results").rglob("results*.json"))
        if done.returncode or not files:
            return (done.stderr.strip().splitlines() or ["no output"])[-1][:200]
        value = json.loads(files[0].read_text())["results"]["wikitext_local"]["word_perplexity,none"]
        return float(value) if math.isfinite(value) else str(value)
