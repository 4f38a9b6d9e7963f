"""Perplexity as lm-eval measures it, on a model object as it is: float, prepared or packed.

The number is lm-eval's own (EleutherAI/lm-evaluation-harness): its task `wikitext`, its model class HFLM, its windows and its metrics.
This file only brings pages and a model to it. The pages come from the hub (the stock task), from a WikiText-2 folder, or from any
`{"page": ...}` lines; the last two run `wikitext_local.yaml`, which names lm-eval's functions and repeats none of them. `write_task` writes the
same task into a folder for lm-eval's command line, so every number here can be checked without aoquant's help:

    lm_eval run --model hf --model_args pretrained=DIR,max_length=512,softmax_dtype=float32 --tasks wikitext_local --include_path FOLDER

What the number means:

- A page is cut into disjoint windows of `window` predicted tokens. A token sees only what precedes it in its window (the last window of a page
  reaches back to full length; the first starts with bos, or eos), so a larger window gives a lower perplexity: always state it, never
  compare across windows.
- Words and bytes are counted on the page before lm-eval detokenises it.
- log-softmax runs in float32. lm-eval's default is the logits' dtype, and bf16 would round every window's sum to 8 bits. For a float32 model the
  two are the same.
- `batch_size` 1 is the definition: no padding, every window a GEMM of its own. In a larger batch the windows share what a format shares
  between rows (a per-tensor activation scale), and sums run in another order.

HFLM would change the model that it is given: `eval()`, and `tie_weights()`, which replaces a quantised head by the embedding again.
It does so for an nn.Module only, so it gets a plain object that calls the model; train and eval modes are restored module by module. The tokenizer
is copied, since HFLM gives it a pad token. Random state is left alone. A local evaluation makes no network access (`datasets` would count
its downloads) and leaves no cache. Needs `pip install aoquant[eval]`.
"""

from __future__ import annotations

import copy
import functools
import importlib.resources
import importlib.util
import json
import logging
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import datasets
import lm_eval
import lm_eval.api.task
import lm_eval.evaluator
import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import resolve_max_length
from lm_eval.tasks import TaskManager
from torch import Tensor, nn
from tqdm import tqdm

from aoquant.integrations.text import read_jsonl

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TASK = "wikitext_local"
HUB = "hub"
EMBEDDED = "heldout.jsonl"
"""The default documents, a file of the package `aoquant.assets`."""


@dataclass(frozen=True)
class Perplexity:
    """One evaluation. Two of them compare only if everything but the first three fields is equal."""

    word_perplexity: float
    byte_perplexity: float
    bits_per_byte: float
    window: int
    """Tokens in a rolling window (lm-eval's `max_length`)."""
    documents: int
    """Documents that were scored."""
    source: str
    task: str
    task_version: str
    limit: int | None
    batch_size: int
    lm_eval_version: str

    def __str__(self) -> str:
        return f"word perplexity {self.word_perplexity:.4f} (window {self.window}, {self.documents} documents of {self.source})"


def evaluate(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    *,
    wikitext: Path | str | None = None,
    documents: Path | str | None = None,
    window: int | None = None,
    limit: int | None = None,
    batch_size: int = 1,
    progress: bool = True,
) -> Perplexity:
    """Run lm-eval's wikitext task on a causal language model and return its three metrics.

    wikitext: "hub", or a folder with WikiText-2 as `test.jsonl`. documents: a file of `{"page": ...}` lines. Neither: the embedded documents.
    window: tokens, at most (and by default) the model's positions. limit: score the first `limit` documents only.
    Raises ValueError for bad arguments and files. The model keeps its train and eval modes; the tokenizer is not touched.
    """
    for name, value in (("window", window), ("limit", limit), ("batch_size", batch_size)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
    window = _window(model, tokenizer, window)
    pages = None if wikitext == HUB and documents is None else _pages(wikitext, documents)
    with ExitStack() as stack:
        stack.enter_context(_quiet())
        if pages is None:
            task, include = "wikitext", Path(lm_eval.__file__).parent / "tasks" / "wikitext"
        else:
            task, include = TASK, Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="aoquant-lm-eval-")))
            # A cache of its own: nothing stays behind, and two runs cannot meet in one.
            _write(include, pages, cache_dir=str(include / "cache"), keep_in_memory=True)
            stack.enter_context(mock.patch.object(datasets.config, "HF_HUB_OFFLINE", True))
        # Without the defaults the manager reads one folder of tasks instead of all (12 s).
        tasks = TaskManager(include_path=include, include_defaults=False).load([task])
        bar = stack.enter_context(tqdm(total=0, desc=f"{task}, window {window}", unit="window", disable=not progress))
        stack.enter_context(_eval_mode(model))
        lm = _LM(model, copy.deepcopy(tokenizer), window, batch_size, bar)
        results = lm_eval.evaluator.evaluate(lm, tasks, limit=limit, bootstrap_iters=0, log_samples=False)
    metrics: dict[str, float] = results["results"][task]
    return Perplexity(
        *(float(metrics[f"{name},none"]) for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")),
        window=window,
        documents=int(results["n-samples"][task]["effective"]),
        source="EleutherAI/wikitext_document_level" if pages is None else str(pages),
        task=task,
        task_version=str(results["versions"][task]),
        limit=limit,
        batch_size=batch_size,
        lm_eval_version=lm_eval.__version__,
    )


def write_task(directory: Path | str, *, wikitext: Path | str | None = None, documents: Path | str | None = None) -> Path:
    """Write the task `wikitext_local` for lm-eval's command line (`--include_path directory`); return the yaml's path.

    The file names the pages by absolute path. Arguments and errors are those of `evaluate`, without "hub", whose task lm-eval has: `wikitext`.
    """
    if wikitext == HUB:
        raise ValueError(f"wikitext must be a folder here, got {HUB!r}; lm-eval has that task itself: --tasks wikitext")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    return _write(directory, _pages(wikitext, documents))


class _Model:
    """What HFLM asks of a model, in an object that it neither switches to eval mode nor ties weights in (see the top)."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.config, self.device = module, module.config, next(module.parameters()).device

    def __call__(self, tokens_BT: Tensor) -> Any:
        return self.module(tokens_BT)


class _LM(HFLM):
    """HFLM with one progress bar for all windows, instead of one for each batch and two more."""

    def __init__(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, window: int, batch_size: int, bar: tqdm[Any]) -> None:
        tokenizer.model_max_length = 10**30  # transformers' own "no limit": a page is cut into windows after it is encoded
        super().__init__(_Model(model), tokenizer=tokenizer, max_length=window, batch_size=batch_size, softmax_dtype=torch.float32)
        self.bar = bar

    def tok_encode(self, string: str, *args: Any, **kwargs: Any) -> list[int]:
        ids: list[int] = super().tok_encode(string, *args, **kwargs)
        self.bar.total += -(-len(ids) // self.max_length)
        return ids

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        scores: list[float] = super().loglikelihood_rolling(requests, disable_tqdm=True)
        return scores

    def _loglikelihood_tokens(self, requests: list[Any], disable_tqdm: bool = True, override_bs: int | None = None) -> list[tuple[float, bool]]:
        scores: list[tuple[float, bool]] = super()._loglikelihood_tokens(requests, disable_tqdm=True, override_bs=override_bs)
        self.bar.update(len(requests))
        return scores


def _window(model: nn.Module, tokenizer: PreTrainedTokenizerBase, window: int | None) -> int:
    """The window to use, checked against the model's positions; also checks that lm-eval can use model and tokenizer at all."""
    config = getattr(model, "config", None)
    if not isinstance(model, nn.Module) or config is None:
        raise ValueError(f"model must be a transformers causal language model (an nn.Module with a config), got {type(model).__name__}")
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        raise ValueError("tokenizer must have a bos or an eos token, which lm-eval puts in front of a page, got neither; set tokenizer.eos_token")
    positions = resolve_max_length(config, default=0)
    if window is None and not positions:
        raise ValueError("window must be given, because the model's config names no max_position_embeddings, got None")
    if window is not None and positions and window > positions:
        raise ValueError(f"window must be at most the model's max_position_embeddings = {positions}, got {window}")
    return window or positions


def _pages(wikitext: Path | str | None, documents: Path | str | None) -> Path:
    """The file of pages that the arguments name, after reading it once: lm-eval would score an empty page as a perfect one."""
    if wikitext is not None and documents is not None:
        raise ValueError(f"at most one of wikitext and documents may be given, got {str(wikitext)!r} and {str(documents)!r}")
    if wikitext is not None:
        path = Path(wikitext) / "test.jsonl"
        if not path.is_file():
            raise ValueError(f'wikitext must be "{HUB}" or a folder with test.jsonl ({{"page": ...}} lines), got {str(wikitext)!r}')
    elif documents is not None:
        path = Path(documents)
        if not path.is_file():
            raise ValueError(f'documents must be an existing file of {{"page": ...}} lines, got {str(documents)!r}')
    else:
        spec = importlib.util.find_spec("aoquant.assets")
        path = Path(next(iter(spec.submodule_search_locations or ()), "")) / EMBEDDED if spec else Path(EMBEDDED)
        if not path.is_file():
            raise ValueError(f"wikitext or documents must be given, because this installation has no aoquant.assets/{EMBEDDED}, got neither")
    pages = read_jsonl(path, ("page",))
    if not pages or not all(page.strip() for page in pages):
        raise ValueError(f"{path} must hold at least one page and no empty one, got {len(pages)} pages of which {sum(not page.strip() for page in pages)} are empty")
    return path.resolve()


def _write(directory: Path, pages: Path, **dataset_kwargs: Any) -> Path:
    template = importlib.resources.files("aoquant.integrations").joinpath(f"{TASK}.yaml").read_text(encoding="utf-8")
    kwargs = {"data_files": {"test": [str(pages)]}, **dataset_kwargs}
    path = directory / f"{TASK}.yaml"
    # A line of JSON is a line of YAML.
    path.write_text(f"{template}dataset_kwargs: {json.dumps(kwargs, ensure_ascii=False)}\n", encoding="utf-8")
    return path


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode for every module, and each module's own mode back, whatever happens."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence what lm-eval and datasets say about a normal run: warnings, the banner of requests, their progress bars."""
    logger = logging.getLogger("lm_eval")
    level, bars = logger.level, not datasets.are_progress_bars_disabled()
    logger.setLevel(logging.ERROR)
    if bars:
        datasets.disable_progress_bars()
    try:
        with mock.patch.object(lm_eval.api.task, "tqdm", functools.partial(tqdm, disable=True)):
            yield
    finally:
        logger.setLevel(level)
        if bars:
            datasets.enable_progress_bars()
