"""A folder of safetensors, filled a layer at a time, that can be continued after an interrupt.

The folder is ".NAME.partial" until it is complete, and has no config.json before that, so it cannot be loaded by
mistake. A journal in it names the source and what is on the disk already; the same export, started again, continues
there, and any other one starts anew.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor

from aoquant.integrations import checkpoint
from aoquant.integrations.safetensors_file import StoredTensor, flush, header, reserve
from aoquant.planning.progress import bar

FLUSHED = 1 << 28  # bytes between two entries of the journal
_JOURNAL = "journal"


class Folder:
    """A folder in the making. identity: of the export, None when it cannot be continued."""

    def __init__(self, out: Path, identity: Sequence[Any] | None) -> None:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ValueError(f"{out} exists and is not an empty folder: remove it or choose another one")
        self.out, self.path = out, out.parent / f".{out.name}.partial"
        self.identity = "" if identity is None else hashlib.sha256(json.dumps(identity).encode()).hexdigest()
        self.done: set[str] = set()

    def fill(
        self,
        tensors: Mapping[str, Tensor],
        groups: Mapping[str, Sequence[str]],
        make: Callable[[str], Mapping[str, Tensor]],
        max_shard_size: int | str,
        metadata: Mapping[str, str],
    ) -> dict[str, Any] | None:
        """Write safetensors files; returns the content of their index, None for a single file.

        tensors: all, shapes and dtypes. groups: names of tensors that are made together, by a name for them. make: a
            group's tensors.
        """
        checkpoint.check_shard_size(max_shard_size)
        split = split_torch_state_dict_into_shards(
            dict(tensors), filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
        )
        size = sum(t.numel() * t.dtype.itemsize for t in tensors.values())
        self._start(size)
        places: dict[str, StoredTensor] = {}
        for file, held in split.filename_to_tensors.items():
            if not self.done:
                reserve(self.path / file, {n: tensors[n] for n in held}, metadata)
            places |= header(self.path / file).tensors
        with bar(size, "export") as advance:
            pending: list[str] = []
            unflushed = 0
            for group, names in groups.items():
                amount = sum(tensors[n].numel() * tensors[n].dtype.itemsize for n in names)
                if group not in self.done:
                    for name, values in make(group).items():
                        assert (values.shape, values.dtype) == (tensors[name].shape, tensors[name].dtype), name
                        places[name].write(values)
                    pending.append(group)
                    unflushed += amount
                    if unflushed >= FLUSHED:
                        self._note(pending, {places[n].path for g in pending for n in groups[g]})
                        pending, unflushed = [], 0
                advance(amount, group)
            self._note(pending, {places[n].path for g in pending for n in groups[g]})
        if not split.is_sharded:
            return None
        return {"metadata": split.metadata, "weight_map": split.tensor_to_filename}

    def finish(self) -> None:
        """Give the folder its name."""
        (self.path / _JOURNAL).unlink()
        for path in (*self.path.iterdir(), self.path):
            flush(path)
        self.path.rename(self.out)
        flush(self.out.parent)

    def _start(self, size: int) -> None:
        self.out.parent.mkdir(parents=True, exist_ok=True)
        journal = self.path / _JOURNAL
        if self.identity and journal.is_file():
            identity, *done = journal.read_text(encoding="utf-8").splitlines()
            if identity == self.identity and done:
                self.done = set(done)
                return
        if self.path.exists():
            shutil.rmtree(self.path)
        if (free := shutil.disk_usage(self.out.parent).free) < size:
            raise ValueError(f"{self.out}: needs {size / 1e9:.2f} GB, and the disk has {free / 1e9:.2f} GB left")
        self.path.mkdir()
        journal.write_text(f"{self.identity}\n", encoding="utf-8")

    def _note(self, groups: Sequence[str], written: set[Path]) -> None:
        """Say in the journal that these groups are on the disk."""
        for path in written:
            flush(path)
        with open(self.path / _JOURNAL, "a", encoding="utf-8") as journal:
            journal.writelines(f"{group}\n" for group in groups)
