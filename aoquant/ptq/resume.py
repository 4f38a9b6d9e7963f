"""A calibration that goes on after it was killed: the codes of each finished block, in a folder.

Every finished block is one safetensors file, which appears by a rename when it is complete. A file names what its codes
depend on: the config, the model's weights and the batches. A folder of another calibration is refused, and so is a file
whose checksums are not those of its bytes. Blocks that are there are given their codes again, and run, because the
inputs of the next block follow from them.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from aoquant._messages import check_path
from aoquant.files import checksums
from aoquant.files.atomic import give_place
from aoquant.files.safetensors_file import digest
from aoquant.formats import Encoded
from aoquant.ptq.ptq_report import PTQRow

RULES = 2  # raised when the same calibration gives other codes than before
_PARTS = ("codes", "scale", "zero", "outer")
Found = dict[str, tuple[Encoded | None, PTQRow]]


def key_of(model: nn.Module, batches: Sequence[Any], asked: object) -> str:
    """Return what codes depend on, as a hash: weights and buffers, batches, the config, this version's rules."""
    given = [(str(at), t) for at, t in enumerate(tree_leaves(list(batches)))]
    tensors = [*model.state_dict().items(), *((at, t) for at, t in given if isinstance(t, Tensor))]
    others = [(at, t) for at, t in given if not isinstance(t, Tensor)]
    return hashlib.sha256(f"{RULES} {digest(tensors)} {asked!r} {others!r}".encode()).hexdigest()


class Blocks:
    """The finished blocks of a calibration in a folder, which need not exist."""

    def __init__(self, folder: Any, model: nn.Module, batches: Sequence[Any], asked: object) -> None:
        """Raise ValueError: the folder is no path, or a file."""
        check_path(folder, "checkpoint", "a folder")
        if Path(folder).exists() and not Path(folder).is_dir():
            raise ValueError(
                f"checkpoint must be a folder, and {folder} is a file: give a folder, which need not exist"
            )
        self.folder, self.key = Path(folder), key_of(model, batches, asked)

    def read(self, fqn: str, *, verify: bool = True) -> Found | None:
        """Return the codes and rows of a block's layers; None where it is not finished. verify: compare checksums.

        Raises:
            ValueError: the file is damaged, or of another model, config, data or version.
        """
        path = self._path(fqn)
        if not path.exists():
            return None
        try:
            if verify:
                checksums.verify([path])
            with safe_open(path, "pt") as file:
                notes = file.metadata() or {}
                parts = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, ValueError) as error:
            raise ValueError(f"{path}: is damaged: remove it, and its block is calibrated again ({error})") from None
        if notes.get("key") != self.key:
            raise ValueError(
                f"{path}: it is of a calibration of another model, config, data or version: give an empty folder, or remove this one"
            )
        return {
            layer: (_encoded(parts, layer, note["k"]), PTQRow(**note["row"]))
            for layer, note in json.loads(notes["layers"]).items()
        }

    def write(self, fqn: str, found: Mapping[str, tuple[Encoded | None, PTQRow]]) -> None:
        """Write a finished block, whole or not at all."""
        parts = {
            f"{layer}:{part}": t.detach().cpu().contiguous()
            for layer, (e, _) in found.items()
            if e is not None
            for part, t in zip(_PARTS, e.tensors, strict=True)
            if t is not None
        }
        notes = {layer: {"k": e and e.k, "row": asdict(row)} for layer, (e, row) in found.items()}
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self._path(fqn)
        partial = path.with_suffix(".partial")
        said = {"key": self.key, "layers": json.dumps(notes)}
        save_file(parts, partial, {**said, checksums.KEY: checksums.table(parts, said)})
        give_place(partial, path)

    def _path(self, fqn: str) -> Path:
        return self.folder / f"{fqn}.safetensors"


def _encoded(parts: Mapping[str, Tensor], layer: str, k: int | None) -> Encoded | None:
    if k is None:
        return None
    return Encoded.of((parts.get(f"{layer}:{part}") for part in _PARTS), k)
