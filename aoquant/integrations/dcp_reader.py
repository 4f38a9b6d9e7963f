"""Read a torch.distributed.checkpoint folder without running what its `.metadata` says.

DCP pickles the description of a checkpoint, and a pickle can call any function. `TensorReader` builds the classes that
such a description is made of and refuses every other name. It takes tensors alone, because DCP unpickles other objects
too, and files of the folder itself, by plain names.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

_METADATA = "torch.distributed.checkpoint.metadata"
# what DCP's metadata of tensors is made of, in torch 2.11 to 2.14
_BUILT = {
    *(
        (_METADATA, name)
        for name in (
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "ChunkStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
}


class TensorReader(FileSystemReader):
    """DCP's reader of a folder, for checkpoints of tensors. Raises ValueError: the metadata is something else."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / ".metadata"
        try:
            with open(path, "rb") as file:
                metadata = _Unpickler(file).load()
            _check(metadata)
        except OSError as error:
            raise ValueError(f"{path}: cannot be read: {error}: remove its folder, and start the run again") from error
        except Exception as error:  # a damaged pickle raises whatever it meets
            raise ValueError(
                f"{path}: was not written by a run of aoquant, or is damaged ({error}): remove the stages folder, and "
                "start the run again"
            ) from error
        found: Metadata = metadata
        found.storage_meta = found.storage_meta or StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not dtype and (module, name) not in _BUILT:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def _check(metadata: Any) -> None:
    """Raise ValueError unless the metadata describes tensors in files of the folder."""
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, Mapping):
        raise ValueError("it holds no metadata")
    if others := [n for n, t in metadata.state_dict_metadata.items() if not isinstance(t, TensorStorageMetadata)]:
        raise ValueError(f"{others[0]!r:.80} is no tensor")
    for place in metadata.storage_data.values():
        name = place.relative_path
        if not isinstance(name, str) or PurePosixPath(name).name != name or place.transform_descriptors:
            raise ValueError(f"{name!r:.80} is no file of the folder")
