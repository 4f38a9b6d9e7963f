"""The cost columns: a row alone on its device, trained for a few steps under cross entropy, converted, and generating.

Ratios to bf16 are taken in the tables, from the row "bf16" measured the same way. Peak memory is the allocator's, of
the training steps; a captured graph keeps its own pool, which counts. Speeds are the best of `TURNS` turns. A row with
a trick of training has no cost: what is measured is the recipe.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from aoquant.integrations.job.models import model_bytes
from aoquant.tools.doctor import MISSING_KERNEL
from experiments.records import Run
from experiments.rows import Row
from experiments.setting import setting_of
from experiments.students import Student
from experiments.tuning import FineTune
from experiments.worker import how_to_step

STEPS, NEW_TOKENS, TURNS = 20, 128, 3


def measure(o: argparse.Namespace, row: Row) -> None:
    """Record one row's cost."""
    setting = setting_of(o, row)
    _, float_model = setting.loaded
    student = Student(row, float_model, setting.corpus["train"])
    cuda = torch.device(o.device).type == "cuda"
    _reset_peak(cuda)
    how = how_to_step(o, row)
    tuning = FineTune(student.prepared(0), None, setting.corpus["train"], setting.budget, **how)
    speed = _training(tuning)
    result: dict[str, Any] = {"train_tokens_s": speed, "peak_bytes": _peak(cuda), **how}
    prepared = student.prepared(0).eval()
    del tuning
    try:
        converted = student.converted(prepared)
        result |= {"model_bytes": model_bytes(converted), "generate_tokens_s": _generate(converted)}
    except MISSING_KERNEL as error:
        result["note"] = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
    setting.records.add(Run(row.name, "cost"), result)
    print(row.name, result, flush=True)


def _training(tuning: FineTune) -> float:
    """Tokens a second of training steps."""
    batch = tuning.blocks_BT[: tuning.budget.batch]
    for _ in range(3):
        tuning.step(batch).item()

    def steps() -> None:
        for _ in range(STEPS):
            loss = tuning.step(batch)
        loss.item()

    return STEPS * batch.numel() / _fastest(steps)


def _generate(model: Any) -> float:
    """Tokens a second of greedy generation for one sequence, eager, as transformers runs it."""
    ids = torch.zeros(1, 8, dtype=torch.long, device=model.device)
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    model.generate(ids, max_new_tokens=8, **options)
    return NEW_TOKENS / _fastest(lambda: model.generate(ids, max_new_tokens=NEW_TOKENS, **options).cpu())


def _fastest(turn: Callable[[], object]) -> float:
    """Seconds of the fastest turn. turn: waits for its device."""
    seconds = []
    for _ in range(TURNS):
        began = time.perf_counter()
        turn()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def _reset_peak(cuda: bool) -> None:
    if cuda:
        torch.cuda.reset_peak_memory_stats()


def _peak(cuda: bool) -> int:
    return torch.cuda.max_memory_allocated() if cuda else 0
