"""What one process does: rows, one after the other, each result appended to the CSV at once.

    PTQ, once -> QAT (or float training) -> score as trained -> convert -> score as served

`equal` says whether every number of the scores is the same bit for bit as trained and as served. A row that fails
leaves its error in the CSV, and the process goes on.
"""

from __future__ import annotations

import copy
import csv
import fcntl
import gc
import json
import queue
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from experiments.rows import Row
from experiments.students import CALIBRATION, Student, weight_bits
from experiments.tuning import ATTENTION
from graphed import graphed
from provenance import provenance
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from aoquant.integrations.finetune import master_adamw, order_of_blocks, rate_at
from aoquant.kv import hook
from real_models import peers, rows
from real_models.causal import CausalLM
from real_models.embedding import Embedding
from real_models.tasks import ANSWER, Tasks

KEY = ("row", "stage", "served", "loss", "tokens", "rate", "seed")
SCORES = (
    "wikitext_word_perplexity", "other_word_perplexity", "wikitext_kl", "wikitext_top1", "other_kl", "other_top1",
    "validation_word_perplexity", "validation_kl", "validation_top1", "one_minus_cosine", "top10", "top1",
)  # fmt: skip
COLUMNS = (
    *KEY, *SCORES, *(f"trained_{name}" for name in SCORES), *ANSWER, "equal", "prompts", "prompts_changed", "bits", "first_loss",
    "last_loss", "seconds_step", "peak_gb", "jobs", "model", "batch", "block", "device", "torch", "transformers",
    "commit", "date", "command", "error",
)  # fmt: skip


def is_embedding(model: Path) -> bool:
    """Return whether a folder's model has no language-model head."""
    architectures = AutoConfig.from_pretrained(str(model), trust_remote_code=False).architectures or ("",)
    return not architectures[0].endswith("ForCausalLM")


def read(path: Path) -> list[dict[str, str]]:
    """Return the lines of a CSV; none where there is none. Raises ValueError for one with other columns."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ValueError(f"--csv {path} is of another version, whose scores are not comparable: give a new file")
        return list(reader)


def widen(path: Path) -> None:
    """Give a CSV the columns that its version did not have. They are empty there."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        lines = list(reader)
    if set(reader.fieldnames or ()) < set(COLUMNS) and set(KEY) <= set(reader.fieldnames or ()):
        path.unlink()
        for line in lines:
            append(path, line)


def missing(o: Any, row: Row, seed: int, done: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Return the keys of a row's results under a seed that the CSV lacks. The first seed's include PTQ. A result with
    an error counts as done.
    """
    loss = "ce" if row.name == "float-ce" else "cosine" if o.embedding else "kl"
    untrained = {"row": row.name, "stage": "ptq", "served": "", "loss": "", "tokens": 0, "rate": 0, "seed": 0}
    trained = {"loss": loss, "tokens": o.tokens, "rate": o.rate, "seed": seed}
    if row.name == "float":
        wanted = [untrained | {"stage": "float"}]
    elif row.kind == "peer":
        wanted = [untrained] if seed == o.seeds[0] else []
    else:
        served = ("torchao", *rows.SERVED[row.recipe]) if row.kind == "torchao" else ("",)
        wanted = [untrained] if row.kind == "aoquant" and seed == o.seeds[0] else []
        wanted += [untrained | trained | {"stage": "qat", "served": by} for by in served if o.tokens]
    have = {tuple(line[name] for name in KEY) for line in done}
    return [key for key in wanted if tuple(str(key[name]) for name in KEY) not in have]


class Worker:
    """One process with its float model."""

    def __init__(self, o: Any) -> None:
        self.o = o
        kind, dtype = (AutoModel, torch.float32) if o.embedding else (AutoModelForCausalLM, torch.bfloat16)
        self.float_model = kind.from_pretrained(str(o.model), dtype=dtype, trust_remote_code=False).to(o.device).eval()
        with safe_open(o.tokens_file, "pt") as file:
            texts = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            bos = file.metadata()["bos"]
        for name in ("wikitext", "other", "validation") if o.pages else ():
            lengths = texts[f"{name}.lengths"][: o.pages]
            texts |= {f"{name}.lengths": lengths, f"{name}.words": texts[f"{name}.words"][: o.pages]}
            texts[f"{name}.ids"] = texts[f"{name}.ids"][: int(lengths.sum())]
        if o.embedding:
            self.task: Any = Embedding(self.float_model, texts, o.batch)
        else:
            self.task = CausalLM(self.float_model, texts, int(bos), o.batch, o.block, o.texts)
        self.tasks = Tasks(o.tasks_file) if o.tasks_file else None

    def run(self, name: str, seed: int) -> None:
        """Make what a row lacks under a seed."""
        row = rows.row(name)
        wanted = missing(self.o, row, seed, read(self.o.csv))
        (mix, _, method), embeddings = name.partition("+"), name.partition("@")[2]
        layers = rows.MIXED[mix][1] if mix in rows.MIXED else ()
        student = Student(row, self.float_model, self.task.blocks_BT.clamp(min=0), method, embeddings, layers)
        untrained = [key for key in wanted if key["stage"] != "qat"]
        trained = [key for key in wanted if key["stage"] == "qat"]
        for key in untrained:
            self._result(key, lambda: self._untrained(row, student))
        if trained:
            self._trained(row, student, trained)

    def _untrained(self, row: Row, student: Student) -> dict[str, Any]:
        if row.kind == "peer":
            model = peers.quantised(self.float_model, student.blocks_BT[:CALIBRATION], row.recipe)
            return self.task.score(model) | self._answers(model)
        model = self.float_model if row.kind == "float" else student.ptq()
        found = self.task.score(model) | self._answers(model)
        return {**found, "bits": weight_bits(model, self.float_model)}

    def _answers(self, model: Any) -> dict[str, float]:
        return self.tasks.score(model) if self.tasks else {}

    def _trained(self, row: Row, student: Student, keys: list[dict[str, Any]]) -> None:
        found: dict[str, Any] = {}

        def train() -> dict[str, Any]:
            model = student.prepared(keys[0]["seed"])
            # sentences have no common length; torchao's layers read numbers back
            graph = self.o.device == "cuda" and row.kind != "torchao" and not self.o.embedding
            graph = graph and self.o.block <= (sliding_window(self.float_model) or self.o.block)
            found.update(self._train(model, keys[0]["loss"], keys[0]["seed"], graph))
            found["model"], found["scores"] = model.eval(), self.task.score(model)
            return self._served(row, student, keys[0], found)

        self._result(keys[0], train)
        for key in keys[1:] if "scores" in found else ():
            self._result(key, lambda key=key: self._served(row, student, key, found))

    def _train(self, model: Any, loss: str, seed: int, graph: bool) -> dict[str, Any]:
        """Train a prepared model. graph: as a CUDA graph of compiled layers; Python is slower than their kernels."""
        o, device = self.o, self.float_model.device
        steps = max(1, round(o.tokens / (o.batch * o.block)))
        blocks_BT = self.task.blocks_BT.to(device)
        order_SB = order_of_blocks(len(blocks_BT), steps, o.batch, seed).to(device)
        optimizer = master_adamw(model.train(), torch.tensor(0.0, device=device), capturable=graph)
        trained = [p for p in model.parameters() if p.requires_grad]

        def step(ids_BT: Tensor) -> Tensor:
            value: Tensor = self.task.loss(model, ids_BT, loss)
            value.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            model.zero_grad(set_to_none=True)
            return value.detach()

        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        losses = torch.zeros(steps, device=device)
        # compiled layers live as long as the graph that runs their kernels
        with for_capture(model, self.float_model) if graph else nullcontext():
            run = graphed(step, model, optimizer, blocks_BT[order_SB[0]]) if graph else step
            began = time.perf_counter()
            for i in range(steps):
                if i == 1:  # the first one compiles kernels
                    losses[0].item()
                    began = time.perf_counter()
                optimizer.param_groups[0]["lr"].fill_(rate_at(o.rate, i, steps))
                losses[i] = run(blocks_BT[order_SB[i]])
        share, seen = max(1, steps // 20), losses.tolist()
        first, last = sum(seen[:share]) / share, sum(seen[-share:]) / share
        if not last < max(2 * first, 0.1):
            raise ValueError(f"diverged: a loss of {first:.4f} at the beginning, {last:.4f} at the end")
        return {
            "first_loss": first,
            "last_loss": last,
            "seconds_step": round((time.perf_counter() - began) / max(1, steps - 1), 4),
            "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2) if device.type == "cuda" else "",
        }

    def _served(self, row: Row, student: Student, key: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
        trained, scores = found["model"], found["scores"]
        if key["served"] in ("", "torchao"):
            model = student.converted(trained)
        else:  # torchao's trained weights on the grid of one of our recipes
            weights, whole = trained.state_dict(), copy.deepcopy(self.float_model)
            whole.load_state_dict({name: weights[name] for name in whole.state_dict()})
            model = Student(rows.row(key["served"]), whole, student.blocks_BT).ptq()
        served = scores if row.kind == "float" else self.task.score(model)
        result = {**served, **{f"trained_{name}": value for name, value in scores.items()}, **self._answers(model)}
        result |= {"equal": torch.equal(scores["nats"], served["nats"]), "bits": weight_bits(model, self.float_model)}
        twins = {name for names in rows.SERVED.values() for name in names}
        if row.kind == "torchao" or row.recipe in twins or hook.quantised(model):
            result |= self.task.differing(trained, model, self.o.prompts)
        return result | {name: found[name] for name in ("first_loss", "last_loss", "seconds_step", "peak_gb")}

    def _result(self, key: dict[str, Any], make: Any) -> None:
        o, about = self.o, provenance(self.o.device)
        try:
            result = make()
        except Exception as error:  # other rows go on
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]}
        made = {name: about["versions"][name] for name in ("torch", "transformers")} | {"commit": o.commit}
        made |= {"device": about["device"], "date": about["date"], "command": o.command}
        made |= {"model": o.model.name, "batch": o.batch, "block": o.block, "jobs": o.jobs}
        line = {**key, **{name: value for name, value in result.items() if name in COLUMNS}, **made}
        append(o.csv, line)
        shown = {name: value for name, value in result.items() if name in (*SCORES, "equal", "error")}
        print(key["row"], key["stage"], key["served"], json.dumps(shown), flush=True)
        gc.collect()
        if o.device == "cuda":
            torch.cuda.empty_cache()


def sliding_window(model: Any) -> int | None:
    """Return how many tokens attention of some layer reaches back at most; None where all reach to the beginning."""
    window: int | None = getattr(model.config.get_text_config(), "sliding_window", None)
    return window


@contextmanager
def for_capture(student: Any, teacher: Any) -> Iterator[None]:
    """Compile decoder layers, whose kernels a graph keeps, and let attention be causal by flag: during a capture
    transformers makes a mask, and compiled layers that meet one compile again, which breaks the capture.

    For blocks that a sliding window holds. Layers with quantised KV caches are not compiled.
    """
    models = (student, teacher)
    layers = [layer for model in models for layer in model.get_decoder().layers]
    before = teacher.config.get_text_config()._attn_implementation
    torch._dynamo.reset()  # rows have other layers, and few versions of one function are kept
    for model in models:
        model.set_attn_implementation(ATTENTION)
    for layer in () if hook.quantised(student) else layers:
        layer.compile(dynamic=False)
    try:
        yield
    finally:
        for layer in layers:
            layer._compiled_call_impl = None
        for model in models:
            model.set_attn_implementation(before)


def append(path: Path, line: dict[str, Any]) -> None:
    """Append a line; processes may do so at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8", newline="") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        writer = csv.DictWriter(file, COLUMNS)
        if file.tell() == 0:
            writer.writeheader()
        writer.writerow(line)


def work(o: Any, waiting: Any, process: int = 0) -> None:
    """Take rows from a queue until it is empty, or until a row like the longest so far would end after the limit."""
    torch.set_num_threads(o.threads)
    if o.device == "cuda":
        torch.cuda.set_device(process % torch.cuda.device_count())
    worker, longest = Worker(o), 0.0
    while time.time() + longest < o.until:
        try:
            unit = waiting.get(timeout=1)
        except queue.Empty:
            return
        began = time.time()
        worker.run(*unit)
        longest = max(longest, time.time() - began)
