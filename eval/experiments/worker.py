"""What one process does: the runs of one row under one loss.

    PTQ, once -> a run for each learning rate with seed 0 -> the other seeds at the rate that validation pages chose

Every run ends with three numbers: the loss on validation pages and the word perplexity of the prepared model, and the
word perplexity of the converted one. Where torchao's converted layer needs a kernel that is not installed here, its
prepared model is scored in its place, and the table says so. For aoquant's rows the two perplexities must be the same
number; the run is recorded in any case, and the command fails naming rows where they are not. The last seed of a row's
first loss is checked further (`checks.py`).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from aoquant.tools.doctor import MISSING_KERNEL
from experiments.checks import checks
from experiments.records import Run, chosen_rate, float_run
from experiments.rows import Row
from experiments.setting import Setting, scored, setting_of
from experiments.students import Student, weight_bits
from experiments.tuning import FineTune

UNFINISHED = 3  # exit status of a worker that met its deadline


def runs_of(row: Row, loss: str, rate: float) -> list[Run]:
    """At the chosen rate, a run for every seed."""
    return [Run(row.name, "qat", loss, rate, seed) for seed in range(row.seeds)]


def missing(setting: Setting, row: Row, loss: str) -> bool:
    """Whether anything of a row under a loss is left to do."""
    found = setting.records.read()
    rate = chosen_rate(found, row.name, loss, row.learning_rates)
    before = float_run(row) if row.kind == "float" else Run(row.name, "ptq")
    return rate is None or before not in found or any(run not in found for run in runs_of(row, loss, rate))


def work(o: argparse.Namespace, row: Row, loss: str, until: float) -> int:
    """Do what is missing; returns the exit status."""
    setting = setting_of(o, row)
    _, float_model = setting.loaded
    student = Student(row, float_model, setting.corpus["train"])
    untrained(setting, row, student)
    tuning: FineTune | None = None
    while (run := _next(setting, row, loss)) is not None:
        weights = student.prepared(run.seed).state_dict()
        if tuning is None:
            tuning = _fine_tune(o, row, loss, student, float_model, setting)
        began = time.perf_counter()
        kept: Path = o.out / "state" / f"{str(run).replace(' ', '_').replace('/', '+')}.pt"
        losses = tuning.run(weights, run.seed, run.rate, kept=kept, until=until)
        if losses is None:
            return UNFINISHED
        seconds = time.perf_counter() - began
        prepared = student.prepared(run.seed)
        prepared.load_state_dict(tuning.student.state_dict())
        result = trained(setting, row, student, prepared.eval(), last=_is_last(run, row, loss))
        share = max(1, len(losses) // 20)
        ends = {"first_loss": sum(losses[:share]) / share, "last_loss": sum(losses[-share:]) / share}
        setting.records.add(run, {**result, **ends, "train_seconds": round(seconds, 1), **tuning.how})
        print(run, {k: v for k, v in result.items() if "perplexity" in k or "loss" in k}, flush=True)
        if time.time() >= until:
            return UNFINISHED if _next(setting, row, loss) is not None else 0
    return 0


def _next(setting: Setting, row: Row, loss: str) -> Run | None:
    found = setting.records.read()
    for rate in row.learning_rates:
        if (run := Run(row.name, "qat", loss, rate, 0)) not in found:
            return run
    rate = chosen_rate(found, row.name, loss, row.learning_rates)
    assert rate is not None
    return next((run for run in runs_of(row, loss, rate) if run not in found), None)


def _is_last(run: Run, row: Row, loss: str) -> bool:
    return loss == row.losses[0] and run.seed == row.seeds - 1 and row.seeds > 1


def _fine_tune(
    o: argparse.Namespace, row: Row, loss: str, student: Student, float_model: Any, setting: Setting
) -> FineTune:
    """With a graph where the row has one; where the capture fails, this process starts again without."""
    cuda = torch.device(o.device).type == "cuda"
    teacher = float_model if loss == "kl" else None
    how = {"compile": cuda and row.compile and not o.eager, "graph": cuda and row.graph and not o.eager}
    try:
        return FineTune(student.prepared(0), teacher, setting.corpus["train"], setting.budget, **how, trick=row.trick)
    except Exception as error:  # whatever a library's step does that a graph cannot hold; without one it is raised
        if not how["graph"]:
            raise
        print(f"{row.name}: no graph ({_first_line(error)}); again without", file=sys.stderr, flush=True)
        os.execv(sys.executable, [sys.executable, *sys.argv, "--eager"])


def untrained(setting: Setting, row: Row, student: Student) -> None:
    """The float model's score, and that of PTQ, where they are missing."""
    found, tokenizer_model = setting.records.read(), setting.loaded
    whole = float_run(row)
    if whole not in found:
        loss = setting.validation_loss(tokenizer_model[1])
        setting.records.add(whole, {**scored(setting.score(tokenizer_model[1])), "validation_loss": loss})
    ptq = Run(row.name, "ptq")
    if row.kind == "float" or ptq in found:
        return
    note = {}
    try:
        model = student.ptq()
        setting.validation_loss(model)
    except MISSING_KERNEL as error:
        if row.kind != "torchao":
            raise
        model, note = student.prepared(0).eval(), {"as_prepared": _first_line(error)}
    result = {**scored(setting.score(model)), "validation_loss": setting.validation_loss(model), **note}
    setting.records.add(ptq, result)


def trained(setting: Setting, row: Row, student: Student, prepared: Any, *, last: bool) -> dict[str, Any]:
    """The numbers of a trained model, before and after convert."""
    before = setting.score(prepared)
    result: dict[str, Any] = {"validation_loss": setting.validation_loss(prepared), **scored(before)}
    result["prepared_word_perplexity"] = before.word_perplexity
    if row.kind == "float":
        return result
    try:
        converted = student.converted(prepared)
        after = setting.score(converted)
    except MISSING_KERNEL as error:
        if row.kind != "torchao":
            raise
        return {**result, "as_prepared": _first_line(error)}
    result |= scored(after)
    result["weight_bits"] = weight_bits(converted, student.float_model)
    result["same_per_document"] = before.loglikelihoods == after.loglikelihoods
    if last and row.kind == "aoquant":
        result |= checks(setting, row, prepared, converted)
    return result


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
