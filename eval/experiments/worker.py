"""What one process does: the runs of one row under one loss.

    PTQ, once -> short runs that search the learning rate on validation pages -> a whole run for every seed

A short run ends with the loss on validation pages of the prepared model and is not scored. Every other run ends with
that number, the word perplexity of the prepared model, and that of the converted one. Where torchao's converted layer
needs a kernel that is not installed here, its prepared model is scored in its place, and the table says so. For
aoquant's rows the two perplexities must be the same number; the run is recorded in any case, and the command fails
naming rows where they are not. Under each loss one trained model of every row of aoquant's is checked further
(`checks.py`).

A run that cannot end before the deadline, by the pace of those before it, is not begun: the device is left to the
processes whose runs can.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from aoquant.tools.doctor import MISSING_KERNEL
from experiments.checks import checks
from experiments.records import Run, chosen_rate, float_run, next_rate, searched
from experiments.rows import Row
from experiments.setting import Setting, scored, setting_of
from experiments.students import Student, weight_bits
from experiments.tuning import FineTune

UNFINISHED = 3  # exit status of a worker that met its deadline, and of a call that leaves runs


def next_run(setting: Setting, row: Row, loss: str) -> Run | None:
    """The next fine-tune: of the search for a learning rate, then of the seeds; None when all are done."""
    found = setting.records.read()
    if (rate := next_rate(searched(found, row.name, loss), row.rates(loss))) is not None:
        return Run(row.name, "search", loss, rate)
    rate = chosen_rate(found, row.name, loss, row.rates(loss))
    assert rate is not None
    runs = [Run(row.name, "qat", loss, rate, seed) for seed in range(row.seeds)]
    return next((run for run in runs if run not in found), None)


def missing(setting: Setting, row: Row, loss: str) -> bool:
    """Whether anything of a row under a loss is left to do."""
    before = float_run(row) if row.kind == "float" else Run(row.name, "ptq")
    return before not in setting.records.read() or next_run(setting, row, loss) is not None


def left(setting: Setting, row: Row, loss: str) -> tuple[int, int]:
    """How many fine-tunes are left: (short ones of the search, as far as it is known; whole ones)."""
    found, rates = setting.records.read(), row.rates(loss)
    tried = searched(found, row.name, loss)
    short = 0 if len(rates) == 1 else sum(rate not in tried for rate in rates)
    short = short or int(next_rate(tried, rates) is not None)
    rate = chosen_rate(found, row.name, loss, rates)
    return short, sum(rate is None or Run(row.name, "qat", loss, rate, seed) not in found for seed in range(row.seeds))


class Pace:
    """Seconds that a step takes, and what follows the last step, as the runs of this process took them."""

    def __init__(self) -> None:
        self.a_step, self.after = 0.0, 0.0

    def expected(self, steps: int) -> float:
        return steps * self.a_step + self.after

    def took(self, steps: int, training: float, after: float) -> None:
        self.a_step, self.after = training / steps, max(self.after, after)


def work(o: argparse.Namespace, row: Row, loss: str, until: float) -> int:
    """Do what is missing; returns the exit status."""
    setting, pace = setting_of(o, row), Pace()
    _, float_model = setting.loaded
    student = Student(row, float_model, setting.corpus["train"])
    untrained(setting, row, student)
    tuning: FineTune | None = None
    while (run := next_run(setting, row, loss)) is not None:
        steps = setting.search_steps if run.stage == "search" else setting.budget.steps
        kept = state_file(setting, row, run)
        if time.time() >= until or (not kept.exists() and time.time() + pace.expected(steps) > until):
            return UNFINISHED
        weights = student.prepared(run.seed).state_dict()
        if tuning is None:
            tuning = _fine_tune(o, row, loss, student, float_model, setting)
        began = time.perf_counter()
        losses = tuning.run(weights, run.seed, run.rate, steps=steps, kept=kept, until=until)
        if losses is None:
            return UNFINISHED
        trained_at = time.perf_counter()
        share = max(1, len(losses) // 20)
        notes = {"first_loss": sum(losses[:share]) / share, "last_loss": sum(losses[-share:]) / share, **tuning.how}
        notes["train_seconds"] = round(trained_at - began, 1)
        prepared = student.prepared(run.seed)
        prepared.load_state_dict(tuning.student.state_dict())
        prepared.eval()
        if run.stage == "search":
            result, converted = {"validation_loss": setting.validation_loss(prepared)}, None
        else:
            result, converted = trained(setting, row, student, prepared)
        pace.took(steps, trained_at - began, time.perf_counter() - trained_at)
        notes["score_seconds"] = round(time.perf_counter() - trained_at, 1)
        setting.records.add(run, {**result, **notes})
        print(run, result, notes, flush=True)
        if row.kind == "aoquant" and converted is not None and not checked(setting, run):
            setting.records.add(replace(run, stage="checks"), checks(setting, row, prepared, converted))
    return 0


def state_file(setting: Setting, row: Row, run: Run) -> Path:
    """Where a run that is stopped leaves its weights: a name for the run, its settings and what the row is."""
    what = {**setting.settings, "kind": row.kind, "recipe": row.recipe, "trick": row.trick}
    digest = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:12]
    out: Path = setting.o.out
    return out / "state" / f"{str(run).replace(' ', '_').replace('/', '+')}-{digest}.pt"


def _fine_tune(
    o: argparse.Namespace, row: Row, loss: str, student: Student, float_model: Any, setting: Setting
) -> FineTune:
    """With a graph where the row has one; where the capture fails, this process starts again without."""
    teacher, how = float_model if loss == "kl" else None, how_to_step(o, row)
    try:
        return FineTune(student.prepared(0), teacher, setting.corpus["train"], setting.budget, **how, trick=row.trick)
    except Exception as error:  # whatever a library's step does that a graph cannot hold; without one it is raised
        if not how["graph"]:
            raise
        print(f"{row.name}: no graph ({_first_line(error)}); again without", file=sys.stderr, flush=True)
        os.execv(sys.executable, [sys.executable, *sys.argv, "--no-graph"])


def checked(setting: Setting, run: Run) -> bool:
    """Whether a model of a run's row, loss and rate was checked, of any seed."""
    return any(replace(done, seed=run.seed) == replace(run, stage="checks") for done in setting.records.read())


def how_to_step(o: argparse.Namespace, row: Row) -> dict[str, bool]:
    """FineTune's compile and graph."""
    fast = torch.device(o.device).type == "cuda" and not o.eager
    return {"compile": fast and row.compile, "graph": fast and row.graph and not o.no_graph}


def untrained(setting: Setting, row: Row, student: Student) -> None:
    """The float model's score, and that of PTQ, where they are missing."""
    found, tokenizer_model = setting.records.read(), setting.loaded
    whole = float_run(row)
    if whole not in found:
        loss = setting.validation_loss(tokenizer_model[1])
        result = {**scored(setting.score(tokenizer_model[1])), "validation_loss": loss}
        setting.records.add(whole, {**result, "parameters": setting.parameters()})
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


def trained(setting: Setting, row: Row, student: Student, prepared: Any) -> tuple[dict[str, Any], Any | None]:
    """The numbers of a trained model, before and after convert, and the converted model where there is one."""
    before = setting.score(prepared)
    result: dict[str, Any] = {"validation_loss": setting.validation_loss(prepared), **scored(before)}
    result["prepared_word_perplexity"] = before.word_perplexity
    if row.kind == "float":
        return result, None
    try:
        converted = student.converted(prepared)
        after = setting.score(converted)
    except MISSING_KERNEL as error:
        if row.kind != "torchao":
            raise
        return {**result, "as_prepared": _first_line(error)}, None
    result |= scored(after)
    result["weight_bits"] = weight_bits(converted, student.float_model)
    result["same_per_document"] = before.loglikelihoods == after.loglikelihoods
    return result, converted


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
