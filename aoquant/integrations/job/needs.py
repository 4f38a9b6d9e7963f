"""The memory and the time that a run will take, before it loads anything.

The model of `config.json` runs once on fake tensors: they have shapes and no values, so the bytes that autograd saves
and the operations are counted for any family, in seconds. Time is that of matrix products alone, at the speed that this
machine shows in a fifth of a second; encoding, decoding and everything else come on top.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil  # accelerate needs it too
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from aoquant.integrations.job.options import Options
from aoquant.integrations.job.training import PRESETS, freeze
from aoquant.integrations.lm_eval import WINDOW, check_within, positions
from aoquant.integrations.losses import BLOCK_BYTES, chunk_rows
from aoquant.integrations.text import assets, find_pages

_LOG = logging.getLogger("torch._subclasses.fake_tensor")
_OPTIMIZER = 12  # bytes a trained parameter: a float32 master and AdamW's two moments
_BYTES_PER_TOKEN = 4  # of text: what tokenizers of English make of it


@dataclass(frozen=True)
class Traced:
    """A model on fake tensors. saved: bytes that autograd keeps of one block. operations: of the products of a token's
    forward, the output head among them.
    """

    parameters: int
    trained: int
    vocabulary: int
    hidden: int
    saved: int
    operations: float
    positions: int


@dataclass(frozen=True)
class Estimate:
    """Bytes of each part of the largest stage, bytes that are free, and seconds at least."""

    stage: str
    parts: dict[str, int]
    available: int
    seconds: float

    @property
    def needed(self) -> int:
        """Return the sum of the parts, in bytes."""
        return sum(self.parts.values())

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {n / 1e9:.1f}" for name, n in self.parts.items())
        return (
            f"estimate: {self.needed / 1e9:.1f} GB of the {self.available / 1e9:.1f} GB that are free, for {self.stage} ({parts}); "
            f"{_duration(self.seconds)} of matrix products alone, at this moment's speed"
        )

    def check(self) -> None:
        """Raise ValueError where the run needs more memory than is free."""
        if self.needed > self.available:
            raise ValueError(
                f"this run does not fit; {self}. Give a smaller --micro-batch or --block against activations and loss, a "
                "smaller --window against logits, more ranks against the optimizer, or another --device or --model"
            )


def estimate(o: Options, ranks: int = 1) -> Estimate | None:
    """Return what a run will take on each of so many ranks; None where its model does not run on fake tensors."""
    dtype = getattr(torch, str(o.dtype))
    traced = trace(o.model or str(assets()), dtype, o.device, o.block, o.freeze)
    if traced is None:
        return None
    check_within("block", o.block, traced.positions)
    check_within("window", o.window, traced.positions)
    size, parameters, trained = dtype.itemsize, traced.parameters, traced.trained
    sequences = min(o.micro_batch or o.batch_size, max(1, o.batch_size // ranks))
    tokens, head = sequences * o.block, traced.vocabulary * traced.hidden
    rows = min(tokens, chunk_rows(traced.vocabulary, tokens, o.device))
    chunk = rows * traced.vocabulary * size
    # of a chunk: the student's logits, the teacher's and a gradient, and float32 rows; or this gradient and the head's,
    # which is summed in float32
    loss = max(3 * chunk + 4 * BLOCK_BYTES, chunk + head * size) + 4 * head * (tokens > rows)
    window = o.window or min(WINDOW, traced.positions or WINDOW)
    # --teacher-cache keeps the float model in the memory of the CPU
    models = {} if o.teacher_cache is not None and o.device != "cpu" else {"float model": parameters * size}
    # what is frozen is the float model's
    shard, whole = {"trained model": trained * size // ranks}, {"trained model": trained * size}
    masters = {"optimizer": trained * _OPTIMIZER // ranks, "gradients": trained * size // ranks}
    # of several micro-batches: the float32 sum of their gradients, and codes of each weight, encoded once
    several = {"micro-batches": trained * (4 + size) // ranks} if sequences * ranks < o.batch_size else {}
    stages = {
        "training": {**models, **shard, **masters, **several, "activations": traced.saved * sequences, "loss": loss},
        "an optimizer step": {**models, **shard, **masters, "gradients of masters": trained * 4 // ranks},
        "scoring": {**models, **whole, "logits": window * traced.vocabulary * (size + 8)},
    }
    largest = max(stages, key=lambda stage: sum(stages[stage].values()))
    text = sum(path.stat().st_size for path in o.texts) // _BYTES_PER_TOKEN
    steps = o.steps or PRESETS[o.preset or "qad"].steps_for(text // o.block, o.batch_size, o.block)
    beside = 3 if o.loss == "ce" else int(o.teacher_cache is None)  # the float model, tuned too; or the teacher
    scored = (4 + (o.loss == "ce")) * _text_bytes(o) / _BYTES_PER_TOKEN
    operations = traced.operations * (steps * o.batch_size * o.block * (3 + beside) + scored) / ranks
    seconds = operations / _speed(traced.hidden, dtype, o.device)
    return Estimate(largest, stages[largest], free_memory(o.device), seconds)


def fitting(o: Options, ranks: int) -> Estimate | None:
    """Return the estimate of a run. Raises ValueError where it needs more memory than is free."""
    if (found := estimate(o, ranks)) is not None:
        found.check()
    return found


def trace(model: str, dtype: torch.dtype, device: str, block: int, frozen: Sequence[str] = ()) -> Traced | None:
    """Run the model of a folder or hub id on fake tensors. None: there is no model, or it looks at values."""
    found = _traced(model, dtype, device, block, frozen)
    if found is None and dtype is not torch.bfloat16:  # fake tensors know grouped products of experts in bfloat16 alone
        found = _traced(model, torch.bfloat16, device, block, frozen)
        found = found and replace(found, saved=found.saved * dtype.itemsize // torch.bfloat16.itemsize)
    return found


def _traced(model: str, dtype: torch.dtype, device: str, block: int, frozen: Sequence[str]) -> Traced | None:
    kept: dict[StorageWeakRef, int] = {}

    def keep(t: Tensor) -> Tensor:
        kept[StorageWeakRef(t.untyped_storage())] = t.untyped_storage().nbytes()
        return t

    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
        _LOG.disabled = True  # it writes a traceback of what is caught here
        with FakeTensorMode(), torch.device(device):
            made: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
            freeze(made, frozen)
            ids = torch.zeros(1, block, dtype=torch.long, device=device)
            with FlopCounterMode(display=False) as counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
                hidden = made.base_model(input_ids=ids, use_cache=False)[0]
            own = {StorageWeakRef(p.untyped_storage()) for p in made.parameters()}
            head = made.get_output_embeddings().weight
            return Traced(
                parameters=sum(p.numel() for p in made.parameters()),
                trained=sum(p.numel() for p in made.parameters() if p.requires_grad),
                vocabulary=head.shape[0],
                hidden=head.shape[1],
                saved=sum(n for storage, n in kept.items() if storage not in own) + hidden.nbytes,
                operations=counter.get_total_flops() / block + 2 * head.numel(),
                positions=positions(made),
            )
    except Exception:  # a family may do with fake tensors what it likes: a run goes on without an estimate
        return None
    finally:
        _LOG.disabled = False


def free_memory(device: str) -> int:
    """Return the bytes that are free on a device: of its memory, or of the machine's, within the process's cgroup."""
    kind = torch.device(device)
    if kind.type == "cuda":
        return torch.cuda.mem_get_info(kind)[0]
    free = psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return min(free, int(limit) - int(used))
    except (OSError, ValueError):  # no cgroup of version 2, or no limit
        return free


def _speed(width: int, dtype: torch.dtype, device: str) -> float:
    """Return the operations a second of a square product of this width, at least 256."""
    n, runs = max(256, width), 0
    a = torch.ones(n, n, dtype=dtype, device=device)
    (a @ a).sum().item()
    begin = time.perf_counter()
    while time.perf_counter() - begin < 0.2:
        (a @ a)[0, 0].item()  # which waits for a GPU
        runs += 1
    return 2 * n**3 * runs / (time.perf_counter() - begin)


def _text_bytes(o: Options) -> int:
    """Return the bytes of the pages that each stage scores; 0 for those of the hub, which are not here yet."""
    pages = find_pages(o.wikitext, None)
    if pages is None:
        return 0
    lines = pages.read_text(encoding="utf-8").splitlines()
    return sum(len(line) for line in lines[: o.limit])


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
