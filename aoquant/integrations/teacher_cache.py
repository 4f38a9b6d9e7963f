"""Top-k log-probabilities of a teacher on disk, and the loss of a student against them.

A student then trains without the teacher in memory. For each token a cache holds the k most likely next tokens, their
log-probabilities, and the log of the mass of all others: 8 k + 4 bytes, in float32 and int32, so nothing is rounded.

**The residual mass.** Let P hold the teacher's top-k tokens, and let p_rest and q_rest be what teacher and student give
to all other tokens together. The loss is the KL divergence of the distributions over k + 1 events:

    loss = sum over i in P of p_i (log p_i - log q_i)  +  p_rest (log p_rest - log q_rest)

By the chain rule of relative entropy the full divergence is larger by p_rest KL(p(. | rest) || q(. | rest)), which is
never negative, so the loss is a lower bound, and it is the full divergence where k is the vocabulary. Its gradient is
the full divergence's for a teacher who shares p_rest out as the student does: per token the two differ by at most
2 p_rest in L1. Renormalising the top-k probabilities instead would push the student's tail to zero.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from filelock import FileLock, Timeout  # torch needs it too
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from aoquant._messages import progress
from aoquant.files.atomic import absent, give_place, unlock
from aoquant.files.safetensors_file import StoredTensor, digest, header, reserve
from aoquant.integrations.launched import Ranks
from aoquant.integrations.losses import chunk_rows, hidden_states, logits_of, sent_to
from aoquant.integrations.text import ONE_TEXT, Documents

FORMAT = "aoquant teacher top-k, version 1"
_SHARD_BYTES = 1 << 28
_LOWEST = torch.finfo(torch.float32).min  # of a token that the teacher rules out: exp() is 0, and 0 times it no NaN


class TopK(NamedTuple):
    """Next-token distributions of a teacher. ids: int32 (..., k). logprobs: float32 (..., k). rest: float32 (...), the
    log of the mass of all other tokens.
    """

    ids: Tensor
    logprobs: Tensor
    rest: Tensor


def top_k(logits_NV: Tensor, k: int) -> TopK:
    """Return the k most likely tokens of each row, with their log-probabilities and the log of the residual mass."""
    logprobs = F.log_softmax(logits_NV.float(), -1).clamp_(min=_LOWEST)
    found, ids = logprobs.topk(k, -1)
    rest = logprobs.scatter_(-1, ids, -torch.inf).logsumexp(-1).clamp_(min=_LOWEST)
    return TopK(ids.int(), found, rest)


def top_k_loss(student_NV: Tensor, teacher: TopK) -> Tensor:
    """Return the KL divergence over the teacher's top-k tokens and the rest as one event, in nats a token. Logits."""
    logprobs, ids = F.log_softmax(student_NV.float(), -1), teacher.ids.long()
    loss = (teacher.logprobs.exp() * (teacher.logprobs - logprobs.gather(-1, ids))).sum(-1)
    if ids.shape[-1] < logprobs.shape[-1]:
        # not log(1 - sum of q_i), which is noise where the student is sure
        rest = logprobs.scatter(-1, ids, -torch.inf).logsumexp(-1)
        loss = loss + teacher.rest.exp() * (teacher.rest - rest)
    return loss.mean()


def description(
    teacher: nn.Module, tokenizer: PreTrainedTokenizerBase, blocks_BT: Tensor, k: int, documents: Documents = ONE_TEXT
) -> dict[str, str]:
    """Return what the log-probabilities depend on: a cache of another description is refused.

    model: the teacher's class, and sha256 of its weights and buffers. tokenizer: sha256 of its vocabulary. data: sha256
    of the token ids of all blocks. window: tokens of a block, which are what a prediction sees at most.
    """
    model = digest(sorted(teacher.state_dict().items()))
    words = json.dumps(sorted(tokenizer.get_vocab().items()))
    return {
        "format": FORMAT,
        "model": f"{type(teacher).__name__} {model}",
        "tokenizer": hashlib.sha256(words.encode()).hexdigest(),
        "data": digest([("blocks", blocks_BT)]),
        "window": str(blocks_BT.shape[1]),
        "separator": str(documents.separator),
        "k": str(k),
    }


_SAID = {"data": "text", "window": "length of blocks", "k": "top k"}  # of `description`


class TeacherCache:
    """Top-k log-probabilities of token blocks, in the safetensors files of a folder.

    Each file names its blocks and holds their `TopK`; its metadata is the `description`. Files appear whole, so a stop
    costs the unfinished file alone, and more blocks of the same text are added as further files.
    """

    def __init__(self, folder: Path, about: dict[str, str], vocabulary: int) -> None:
        """Open a folder, which may be empty or missing. about: the `description` of what it must hold.

        Raises:
            ValueError: k is not in 1 .. vocabulary, or a file is damaged, no part of a cache, or of another teacher,
                tokenizer, text, window or k.
        """
        k = int(about["k"])
        if not 1 <= k <= vocabulary:
            raise ValueError(f"the teacher's top k must be in 1 .. {vocabulary} (its vocabulary), got {k}")
        self.folder, self.about, self.k, self.vocabulary = folder, about, k, vocabulary
        self.window = int(about["window"])
        self.places: dict[int, tuple[dict[str, StoredTensor], int]] = {}  # block: its file's tensors, its row there
        for path in sorted(folder.glob("*.safetensors")):
            self._take(path)

    def _take(self, path: Path) -> None:
        metadata, stored = header(path)
        if other := [name for name, value in self.about.items() if metadata.get(name) != value]:
            if "window" in other:
                other = [name for name in other if name != "data"]  # other blocks, maybe of the same text
            raise ValueError(
                f"{path}: was made with another {' and another '.join(_SAID.get(name, name) for name in other)}: choose another "
                f"--teacher-cache, or remove {self.folder}"
            )
        n = stored["blocks"].shape[0] if "blocks" in stored else 0
        k, window = self.k, self.window
        shapes = {"blocks": (n,), "ids": (n, window, k), "logprobs": (n, window, k), "rest": (n, window)}
        dtypes = {"blocks": torch.int64, "ids": torch.int32, "logprobs": torch.float32, "rest": torch.float32}
        if {name: (t.shape, t.dtype) for name, t in stored.items()} != {n: (shapes[n], dtypes[n]) for n in shapes}:
            raise ValueError(f"{path}: holds other tensors than a teacher's cache: remove it, and run again")
        for row, block in enumerate(stored["blocks"].read().tolist()):
            self.places[block] = (stored, row)

    def read(self, blocks: Tensor, device: torch.device) -> TopK:
        """Return the distributions of all tokens of `blocks` (indices), flattened to rows.

        Raises:
            ValueError: a file is damaged.
        """
        rows = []
        for block in blocks.tolist():
            stored, row = self.places[block]
            found = TopK(*(stored[name].rows(row, row + 1)[0] for name in TopK._fields))
            mass = found.logprobs.exp().sum(-1) + found.rest.exp()
            named = (found.ids >= 0) & (found.ids < self.vocabulary)
            if not (bool(named.all()) and bool(((mass - 1).abs() < 1e-3).all())):
                raise ValueError(f"{stored['ids'].path}: is damaged (block {block}): remove it, and run again")
            rows.append(found)
        return TopK(*(sent_to(device, torch.cat(parts)) for parts in zip(*rows, strict=True)))

    @torch.no_grad()
    def fill(
        self, teacher: PreTrainedModel, blocks_BT: Tensor, used: Tensor, ranks: Ranks, documents: Documents = ONE_TEXT
    ) -> None:
        """Compute what is missing of the blocks that are `used` (indices). The rest: as `opened` has it.

        A collective: ranks share the files out.

        Raises:
            ValueError: another process fills the folder, or the disk is too small.
        """
        missing = [block for block in dict.fromkeys(used.flatten().tolist()) if block not in self.places]
        each = self.window * (8 * self.k + 4)
        lock, made = FileLock(self.folder / ".lock", timeout=0), list[Path]()

        def begin() -> int:
            """Take the folder; returns the number of its next file."""
            made.extend(absent(self.folder))
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire()
            except Timeout:
                raise ValueError(f"{self.folder} is in use by another run: wait until it ends") from None
            if (free := shutil.disk_usage(self.folder).free) < each * len(missing):
                raise ValueError(
                    f"{self.folder}: needs {each * len(missing) / 1e9:.1f} GB for the teacher's log-probabilities, and "
                    f"the disk has {free / 1e9:.1f} GB left: choose a smaller --teacher-top-k or another --teacher-cache"
                )
            return 1 + max((int(p.stem) for p in self.folder.glob("*.safetensors") if p.stem.isdigit()), default=-1)

        def compute(block: int) -> TopK:
            inputs = documents.inputs(blocks_BT[block][None].to(teacher.device))
            parts = hidden_states(teacher, **inputs)[0].split(chunk_rows(self.vocabulary))
            found = (top_k(logits_of(teacher, part), self.k) for part in parts)
            return TopK(*map(torch.cat, zip(*found, strict=True)))

        teacher.eval()
        if not missing:
            return
        try:
            number = ranks.share(begin)
            size = max(1, _SHARD_BYTES // each)
            files = [missing[i : i + size] for i in range(0, len(missing), size)]
            with progress(len(missing), "teacher", "block", show=ranks.first) as bar:
                for i, indices in enumerate(files):
                    if i % ranks.size == ranks.rank:
                        self._write(self.folder / f"{number + i:06}.safetensors", indices, compute, bar)
            if ranks.launched:
                dist.barrier()  # all files are there
            for i in range(len(files)):
                self._take(self.folder / f"{number + i:06}.safetensors")
        finally:
            unlock(lock, made)

    def _write(self, path: Path, indices: list[int], compute: Callable[[int], TopK], bar: Any) -> None:
        n, partial = len(indices), path.with_suffix(".partial")
        shapes: dict[str, Any] = {
            "blocks": torch.tensor(indices, device="cpu"),
            "ids": torch.empty(n, self.window, self.k, dtype=torch.int32, device="meta"),
            "logprobs": torch.empty(n, self.window, self.k, device="meta"),
            "rest": torch.empty(n, self.window, device="meta"),
        }
        places = reserve(partial, shapes, self.about)
        places["blocks"].write(shapes["blocks"])
        for row, block in enumerate(indices):
            for name, values in compute(block)._asdict().items():
                places[name].write(values, row * values.numel() * values.dtype.itemsize)
            bar.update(1)
        give_place(partial, path)


def opened(
    folder: Path,
    teacher: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    blocks_BT: Tensor,
    k: int,
    ranks: Ranks,
    documents: Documents = ONE_TEXT,
) -> TeacherCache:
    """Return the cache of `teacher` in `folder`, which holds what was computed before.

    blocks_BT: int64 token ids (B, T). k: tokens that are kept of a distribution. documents: how `blocks_BT` holds
    documents. A collective of all ranks, which must see one folder.

    Raises:
        ValueError: as `TeacherCache` does.
    """
    about = ranks.share(lambda: description(teacher, tokenizer, blocks_BT, k, documents))
    return TeacherCache(folder, about, teacher.get_output_embeddings().weight.shape[0])
