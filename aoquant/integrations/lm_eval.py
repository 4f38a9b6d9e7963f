"""Perplexity as lm-eval measures it (task `wikitext`, class HFLM), on a model object: float, prepared or packed.

Only the pages may be local: `wikitext_local.yaml` names lm-eval's functions and repeats none. A page is cut into
windows of `window` predicted tokens, so a larger window gives a lower perplexity: state it, and never compare across
windows. lm-eval begins only the first window of a page with <bos>, and scores a second <bos> after it where the
tokenizer adds one. Here each window begins with <bos> and none is scored, unless `bos` is False. log-softmax runs in
float32; lm-eval's default is the dtype of the logits, and a bf16 window's sum would have 8 bits. In a batch of more
than one, windows share what a format shares between rows.
"""

import copy
import glob
import json
import logging
import random
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import lm_eval.api.task
import lm_eval.evaluator
import torch
import torch.distributed as dist
from lm_eval.models import huggingface
from lm_eval.models.utils import resolve_max_length
from lm_eval.tasks import TaskManager
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from aoquant._messages import one_line
from aoquant._messages import progress as progress_bar
from aoquant.integrations.text import Source, beginning, described, find_pages, read_jsonl

TASK = "wikitext_local"
METRICS = ("word_perplexity", "byte_perplexity", "bits_per_byte")
WINDOW = 2048  # by default: logits of 32 768 positions and 262 144 tokens would take 34 GB


def check_shares(pages: Path | None, limit: int | None, ranks: int) -> None:
    """Raise ValueError where ranks have no document each. pages: as `find_pages` returns them; None: lm-eval's own."""
    if pages is not None and ranks > min(len(read_jsonl(pages, ("page",))), limit or ranks):
        raise ValueError(f"{ranks} ranks need as many documents to share, got fewer in {pages} with limit={limit}")


@dataclass(frozen=True)
class Perplexity:
    """One evaluation. Two of them compare only if all fields but the three metrics are equal."""

    word_perplexity: float
    byte_perplexity: float
    bits_per_byte: float
    window: int
    documents: int
    source: str
    task: str
    task_version: str
    limit: int | None
    batch_size: int
    loglikelihoods: tuple[float, ...]
    """Of each document, in nats."""
    words: tuple[int, ...]
    """Words of each document; word_perplexity = exp(-sum(loglikelihoods) / sum(words))."""
    bos: bool = False
    """Say whether each window begins with the tokenizer's BOS token."""

    def __str__(self) -> str:
        return (
            f"word perplexity {self.word_perplexity:.4f}, byte perplexity {self.byte_perplexity:.4f}, "
            f"{self.bits_per_byte:.4f} bits/byte ({self.windows}, {self.documents} documents of {self.source})"
        )

    @property
    def windows(self) -> str:
        """Return the windows in words."""
        return f"window {self.window} tokens, {'each begins with BOS' if self.bos else 'none begins with BOS'}"


def evaluate(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    *,
    wikitext: Source = None,
    documents: Source = None,
    window: int | None = None,
    limit: int | None = None,
    batch_size: int = 1,
    bos: bool = True,
    progress: bool = True,
    shared: bool = False,
) -> Perplexity:
    """Run lm-eval's wikitext task on a causal language model.

    wikitext: "hub" or a folder with test.jsonl. documents: `{"page": ...}` lines. Neither: docstrings of the standard
    library. window: tokens; at most the model's positions, and by default 2048 of them. limit: score only the first
    documents. bos: begin every window with the token that the tokenizer begins texts with, if it does so, and do not
    score that token; otherwise the numbers are those of lm-eval's own command line.
    shared: the ranks of the default process group score a part of the documents each; all call it, with equal models,
    and all get the result. lm-eval shares them out and makes the numbers of forwards equal.
    Raises ValueError for arguments and files that do not fit, before anything runs.
    """
    for name, value in (("window", window), ("limit", limit), ("batch_size", batch_size)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
    window = check_window(model, tokenizer, window)
    pages = find_pages(wikitext, documents)
    rank, size = (dist.get_rank(), dist.get_world_size()) if shared else (0, 1)
    check_shares(pages, limit, size)
    with ExitStack() as stack:
        _quiet_eval(stack, model)
        if pages is None:
            task, include = "wikitext", _of_lm_eval()
        else:
            task, include = TASK, Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="aoquant-")))
            write_task(include, documents=pages, cache_dir=str(include / "cache"), keep_in_memory=True)
            stack.enter_context(mock.patch.object(datasets.config, "HF_HUB_OFFLINE", True))
        tasks = _load(task, include)
        label = f"{task}, window {window}"
        bar = stack.enter_context(progress_bar(0, label, "window", show=progress and rank == 0))
        tokenizer = copy.deepcopy(tokenizer)  # HFLM gives it a pad token
        tokenizer.model_max_length = 10**30  # no warning: a page is encoded whole, then cut into windows
        options = {"max_length": window, "batch_size": batch_size, "softmax_dtype": torch.float32}
        lm = _LM(_Model(model, bar), tokenizer=tokenizer, **options)
        lm.first = beginning(tokenizer) if bos else None
        if lm.first is not None:
            stack.enter_context(mock.patch.object(huggingface.utils, "get_rolling_token_windows", _windows))
        lm._rank, lm._world_size = rank, size
        # Not simple_evaluate, which seeds every random generator and looks the model up on the hub.
        results = lm_eval.evaluator.evaluate(lm, tasks, limit=limit, bootstrap_iters=0, log_samples=True)
    box = [results]  # on rank 0; None elsewhere
    if size > 1:
        dist.broadcast_object_list(box, src=0)
    (results,) = box
    metrics = results["results"][task]
    samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])  # ranks follow one another there
    scored = [sample["word_perplexity"] for sample in samples]  # (loglikelihood, words)
    return Perplexity(
        **{name: metrics[f"{name},none"] for name in METRICS},
        window=window,
        documents=int(results["n-samples"][task]["effective"]),
        source="EleutherAI/wikitext_document_level" if pages is None else described(pages),
        task=task,
        task_version=str(results["versions"][task]),
        limit=limit,
        batch_size=batch_size,
        loglikelihoods=tuple(float(nats) for nats, _ in scored),
        words=tuple(int(words) for _, words in scored),
        bos=lm.first is not None,
    )


def _windows(
    token_list: list[int], prefix_token: int, max_seq_len: int, context_len: int = 1
) -> Iterator[tuple[list[int], list[int]]]:
    """lm-eval's windows of a page, (input, predicted), each of which begins with `prefix_token`.

    As lm-eval's, a later window sees one token before those that it predicts, and the last one reaches back.
    """
    if token_list:
        yield [prefix_token, *token_list[: max_seq_len - 1]][: len(token_list)], token_list[:max_seq_len]
    room = max(1, max_seq_len - 1)
    for start in range(max_seq_len, len(token_list), room):
        stop = min(start + room, len(token_list))
        seen = token_list[max(0, stop - 1 - room) : stop - 1]
        yield [prefix_token, *seen][-max_seq_len:], token_list[start:stop]


def write_task(
    directory: Path | str, *, wikitext: Source = None, documents: Source = None, **dataset_kwargs: Any
) -> Path:
    """Write the task that `evaluate` runs, for lm-eval's `--include_path directory`; return the yaml's path.

    dataset_kwargs go to `datasets.load_dataset`. Pages are named by absolute path.
    """
    pages = find_pages(wikitext, documents)
    if pages is None:
        raise ValueError("wikitext must be a folder here, got 'hub': lm-eval has that task, use --tasks wikitext")
    # A line of JSON is a line of YAML.
    kwargs = json.dumps({"data_files": {"test": [glob.escape(str(pages))]}, **dataset_kwargs}, ensure_ascii=False)
    template = Path(__file__).with_name(f"{TASK}.yaml").read_text(encoding="utf-8")
    path = Path(directory) / f"{TASK}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{template}dataset_kwargs: {kwargs}\n", encoding="utf-8")
    return path


def check_hub() -> None:
    """Fetch WikiText-2 from the hub, once for all stages: `datasets` keeps it.

    Raises:
        ValueError: it cannot be fetched, and was not before.
    """
    with ExitStack() as stack:
        _quiet_logs(stack)
        _load("wikitext", _of_lm_eval())


def _of_lm_eval() -> Path:
    return Path(lm_eval.__file__).parent / "tasks" / "wikitext"


def _load(task: str, include: Path) -> Any:
    """Return a task of the folder `include`, with its pages. One folder: reading all of lm-eval's takes 12 s."""
    try:
        return TaskManager(include_path=include, include_defaults=False).load([task])
    except OSError as error:
        if task == TASK:
            raise
        raise ValueError(
            f"cannot fetch WikiText-2 from the hub ({one_line(error)}): give wikitext, or --wikitext, a folder with test.jsonl"
        ) from error


class _Model:
    """A model as HFLM needs it, in an object that HFLM leaves as it is; counts windows."""

    def __init__(self, module: nn.Module, bar: Any) -> None:
        self.module, self.bar = module, bar
        self.config, self.device = module.config, next(module.parameters()).device

    def __call__(self, tokens_BT: Tensor) -> Any:
        output = self.module(tokens_BT)
        self.bar.update(len(tokens_BT))
        return output


class _LM(huggingface.HFLM):
    """HFLM that says how many windows there will be: it encodes all pages before it scores one.

    Between ranks it speaks by torch.distributed; HFLM needs accelerate for that, and takes the rank within a host. What
    it gathers last is the number of windows of each, which all then pad to the largest.
    """

    first: int | None = None  # begins every window

    def all_gather(self, tensor: Tensor) -> Tensor:
        if self._world_size == 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self._world_size)]
        dist.all_gather(parts, tensor)
        gathered = torch.stack(parts)
        self.model.bar.total = int(gathered.max())
        return gathered

    def barrier(self) -> None:
        if self._world_size > 1:
            dist.barrier()

    def tok_encode(self, string: str, *args: Any, **kwargs: Any) -> Any:
        ids = super().tok_encode(string, *args, **kwargs)
        if self.first is not None and ids[:1] == [self.first]:
            del ids[0]  # the windows begin with it
        windows = _windows(ids, 0, self.max_length) if self.first is not None else range(0, len(ids), self.max_length)
        self.model.bar.total += sum(1 for _ in windows)
        return ids

    @property
    def prefix_token_id(self) -> int:
        return super().prefix_token_id if self.first is None else self.first


def check_window(model: nn.Module, tokenizer: Any, window: int | None) -> int:
    """Return the window that `evaluate` takes: by default the model's positions, at most WINDOW.

    Raises:
        ValueError: the model or its tokenizer cannot be scored, or the window is missing or too long.
    """
    if getattr(model, "config", None) is None:
        raise ValueError(f"model must be a transformers causal language model, got {type(model).__name__}")
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        raise ValueError("tokenizer must have a bos or eos token to begin a page with, got neither: set eos_token")
    most = positions(model)
    if not window and not most:
        raise ValueError(
            "window must be given, as the model's config has no max_position_embeddings, got None: give window=N, or --window N"
        )
    check_within("window", window, most)
    return window or min(most, WINDOW)


def check_within(name: str, tokens: int | None, positions: int) -> None:
    """Raise ValueError for an option of more tokens than the model's positions; 0: it has no limit."""
    if tokens and tokens > positions > 0:
        raise ValueError(f"{name} must be at most the model's max_position_embeddings = {positions}, got {tokens}")


def positions(model: nn.Module) -> int:
    """Return the longest sequence that the model's config allows, in tokens; 0 where it names no limit."""
    return resolve_max_length(model.config, default=0)


def _quiet_eval(stack: ExitStack, model: nn.Module) -> None:
    """The model in eval mode, lm-eval and datasets without logs and bars, until the stack closes."""
    _quiet_logs(stack)
    for has_bars in (lm_eval.api.task, huggingface):
        stack.enter_context(mock.patch.object(has_bars, "tqdm", lambda *a, **k: tqdm(*a, **k | {"disable": True})))
    for module in model.modules():
        stack.callback(setattr, module, "training", module.training)
    model.eval()


def _quiet_logs(stack: ExitStack) -> None:
    """lm-eval and datasets without logs and bars, and random numbers as they were, when the stack closes."""
    stack.callback(random.setstate, random.getstate())
    logger = logging.getLogger("lm_eval")
    stack.callback(logger.setLevel, logger.level)
    logger.setLevel(logging.ERROR)
    if not datasets.are_progress_bars_disabled():
        stack.callback(datasets.enable_progress_bars)
        datasets.disable_progress_bars()
