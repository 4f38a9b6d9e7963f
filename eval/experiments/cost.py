"""The cost columns: a row alone on its device, trained for a few steps under cross entropy, then converted, generating.

Ratios to bf16 are taken in the tables (costs.py). Training's are to the row "bf16", measured the same way. Peak memory
is the allocator's, of the training steps; a captured graph keeps its own pool, which counts. A generating model is
timed in turns with the float one, because the host's speed differs between processes. Speeds are the best of `TURNS`
turns. A row with a trick of training has no cost: what is measured is the recipe.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Container
from functools import partial
from typing import Any

import torch

from aoquant.integrations.job.models import model_bytes
from aoquant.tools.doctor import MISSING_KERNEL
from experiments.records import Run
from experiments.rows import Row
from experiments.setting import Setting, setting_of
from experiments.students import Student
from experiments.tuning import FineTune
from experiments.worker import how_to_step

STEPS, NEW_TOKENS, TURNS = 20, 128, 3


def left(row: Row, found: Container[Run]) -> bool:
    """Whether anything of a row is left to measure. found: what was."""
    return not (Run(row.name, "cost") in found and Run(row.name, "generate") in found)


def measure(o: argparse.Namespace, row: Row) -> None:
    """Record what is left of one row's cost."""
    torch._dynamo.reset()  # of the row before, where a process has several
    gc.collect()
    setting = setting_of(o, row)
    student = Student(row, setting.loaded[1], setting.corpus["train"])
    for stage, measured in (("cost", _trained), ("generate", _generating)):
        if (run := Run(row.name, stage)) not in setting.records.read():
            result = measured(o, row, setting, student)
            setting.records.add(run, result)
            print(run, result, flush=True)


def _trained(o: argparse.Namespace, row: Row, setting: Setting, student: Student) -> dict[str, Any]:
    """Tokens a second of training steps, and the memory that they take."""
    cuda = torch.device(o.device).type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    how = how_to_step(o, row)
    tuning = FineTune(student.prepared(0), None, setting.corpus["train"], setting.budget, **how)
    batch = tuning.blocks_BT[: tuning.budget.batch]
    for _ in range(3):
        tuning.step(batch).item()

    def steps() -> None:
        for _ in range(STEPS):
            loss = tuning.step(batch)
        loss.item()

    speed = STEPS * batch.numel() / min(_seconds(steps) for _ in range(TURNS))
    return {"train_tokens_s": speed, "peak_bytes": torch.cuda.max_memory_allocated() if cuda else 0, **how}


def _generating(o: argparse.Namespace, row: Row, setting: Setting, student: Student) -> dict[str, Any]:
    """Tokens a second of greedy generation for one sequence, eager, as transformers runs it; and bf16's."""
    float_model = setting.loaded[1]
    try:
        models = float_model, student.converted(student.prepared(0).eval())
        generated(models[1], 8)
    except MISSING_KERNEL as error:
        return {"note": (str(error).strip() or type(error).__name__).splitlines()[0][:200]}
    generated(float_model, 8)
    turns = [[_seconds(partial(generated, model, NEW_TOKENS)) for model in models] for _ in range(TURNS)]
    bf16, seconds = (min(of) for of in zip(*turns, strict=True))
    speeds = {"tokens_s": NEW_TOKENS / seconds, "bf16_tokens_s": NEW_TOKENS / bf16}
    return {**speeds, "model_bytes": model_bytes(models[1])}


def generated(model: Any, tokens: int) -> None:
    """Generate this many tokens, and wait for them."""
    ids = torch.zeros(1, 8, dtype=torch.long, device=model.device)
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    model.generate(ids, max_new_tokens=tokens, **options).cpu()


def _seconds(run: Callable[[], object]) -> float:
    """run: waits for its device."""
    began = time.perf_counter()
    run()
    return max(time.perf_counter() - began, 1e-6)  # some clocks stand still for milliseconds
