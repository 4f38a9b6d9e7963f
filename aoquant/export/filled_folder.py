"""A folder of safetensors, filled a layer at a time, that can be continued after an interrupt.

The folder is staged (`files/atomic.py`) until it is complete, and has no config.json before that, so it cannot
be loaded by mistake. A journal in it names the source and what is on the disk already, with checksums; the same export,
started again, continues there, and any other one starts anew.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor

from aoquant._messages import bar
from aoquant.files import checkpoint, checksums
from aoquant.files.atomic import Staged, flush
from aoquant.files.safetensors_file import StoredTensor, header, replace_metadata, reserve

FLUSHED = 1 << 28  # bytes between two entries of the journal
_JOURNAL = "journal"


class Folder(Staged):
    """A folder in the making. identity: of the export, None when it cannot be continued."""

    def __init__(self, out: Path, identity: Sequence[Any] | None) -> None:
        super().__init__(out, fresh=True, resumable=identity is not None)
        self.identity = "" if identity is None else hashlib.sha256(json.dumps(identity).encode()).hexdigest()
        self.sums: dict[str, int] = {}

    def fill(
        self,
        tensors: Mapping[str, Tensor],
        groups: Mapping[str, Sequence[str]],
        make: Callable[[str], Mapping[str, Tensor]],
        max_shard_size: int | str,
        configs: Mapping[str, Any],
    ) -> None:
        """Write safetensors files, and their index where they are several.

        tensors: all, shapes and dtypes. groups: names of tensors that are made together, by a name for them. make: a
            group's tensors. configs: content of the JSON files that say how the tensors are read, by file.
        """
        checkpoint.check_shard_size(max_shard_size)
        split = split_torch_state_dict_into_shards(
            dict(tensors), filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
        )
        size = sum(t.numel() * t.dtype.itemsize for t in tensors.values())
        configs = dict(configs)
        if split.is_sharded:
            configs[checkpoint.INDEX] = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        metadata = {"format": "pt", checksums.CONFIGS: checksums.of_configs(configs)}
        metadata[checksums.FOLDER] = checksums.of_folder({})  # a placeholder of the same length
        resumed = self._resume()
        if not resumed:
            self.begin(size)
            (self.path / _JOURNAL).write_text(f"{self.identity}\n", encoding="utf-8")
        places: dict[str, StoredTensor] = {}
        for file, held in split.filename_to_tensors.items():
            inside = {n: tensors[n] for n in held}
            if not resumed:
                room = checksums.encoded(dict.fromkeys(held, 0), metadata)
                reserve(self.path / file, inside, {**metadata, checksums.KEY: room})
            places |= header(self.path / file).tensors
        with bar(size, "export") as shown:
            pending: list[str] = []
            unflushed = 0
            for group, names in groups.items():
                amount = sum(tensors[n].numel() * tensors[n].dtype.itemsize for n in names)
                if any(n not in self.sums for n in names):
                    for name, values in make(group).items():
                        assert (values.shape, values.dtype) == (tensors[name].shape, tensors[name].dtype), name
                        places[name].write(values)
                        self.sums[name] = checksums.extend(checksums.start(values.dtype, values.shape), values)
                    pending += names
                    unflushed += amount
                    if unflushed >= FLUSHED:
                        self._note(pending, places)
                        pending, unflushed = [], 0
                shown.set_postfix(tensor=group)
                shown.update(amount)
            self._note(pending, places)
        metadata[checksums.FOLDER] = checksums.of_folder(self.sums)
        for file, held in split.filename_to_tensors.items():
            sums = checksums.encoded({n: self.sums[n] for n in held}, metadata)
            replace_metadata(self.path / file, {**metadata, checksums.KEY: sums})
        if split.is_sharded:
            text = json.dumps(configs[checkpoint.INDEX], indent=2, sort_keys=True) + "\n"
            (self.path / checkpoint.INDEX).write_text(text, encoding="utf-8")

    def publish(self) -> None:
        """Give the folder its name."""
        (self.path / _JOURNAL).unlink()
        super().publish()

    def _resume(self) -> bool:
        """Read the journal that an interrupted export of the same tensors left."""
        journal = self.path / _JOURNAL
        if not self.identity or not journal.is_file():
            return False
        identity, *lines = journal.read_text(encoding="utf-8").splitlines(keepends=True)
        if identity != f"{self.identity}\n":
            return False
        for line in lines:
            if line.endswith("\n"):  # a kill may leave half of the last line
                self.sums |= json.loads(line)
        return bool(self.sums)

    def _note(self, names: Sequence[str], places: Mapping[str, StoredTensor]) -> None:
        """Say in the journal that these tensors are on the disk."""
        for path in {places[n].path for n in names}:
            flush(path)
        with open(self.path / _JOURNAL, "a", encoding="utf-8") as journal:
            journal.write(json.dumps({n: self.sums[n] for n in names}) + "\n")
