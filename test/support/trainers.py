"""A Hugging Face Trainer of a few steps on the CPU, for the tests that train through it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import Trainer, TrainingArguments


def trainer(model: Any, folder: Path, rows: Tensor, steps: int = 3, **arguments: Any) -> Trainer:
    """Make a Trainer that predicts `rows`, in batches of two, and evaluates on the first two."""
    defaults = {"save_strategy": "no", "logging_steps": 1, "learning_rate": 1e-2, "per_device_train_batch_size": 2}
    options = TrainingArguments(
        str(folder), max_steps=steps, use_cpu=True, report_to=[], disable_tqdm=True, **(defaults | arguments)
    )
    data = [{"input_ids": row, "labels": row} for row in rows]
    return Trainer(model, options, train_dataset=data, eval_dataset=data[:2])
