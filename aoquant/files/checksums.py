"""Checksums of a checkpoint's tensors: damage that leaves a file readable is an error when the model is loaded.

Every file that aoquant writes has an entry `aoquant_crc32` in its metadata: a JSON object with a CRC-32 for each
tensor, of its dtype, its shape and its bytes, one for the rest of the metadata, and the version of the format
(STABILITY.md). Every shard holds the checksums of
all shards, or of that table, so shards of two checkpoints do not mix. CRC-32 guards against damage, not against an
attacker; it is the fastest in the standard library, and can be computed piece by piece in threads.
"""

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aoquant.files.safetensors_file import MALFORMED, StoredTensor, dtype_name, header, raw_bytes, read_json

KEY = "aoquant_crc32"
CONFIGS = "aoquant_configs_crc32"
FOLDER = "aoquant_folder_crc32"
ENTRIES = (KEY, CONFIGS)  # of a header, beside the descriptions of tensors
_METADATA = "__metadata__"  # the entry of the rest of the metadata
_FORMAT = "__format__"  # the entry of the format's version, which tables made before it lack
VERSION = 1  # moves when an older aoquant would read a new file wrongly
_CONFIG = "config.json"
_BY_OTHERS = (KEY, "format")  # transformers adds "format" after the checksums are made
_verifying: ContextVar[bool] = ContextVar("verifying", default=True)


@contextmanager
def not_verified() -> Iterator[None]:
    """Load without comparing checksums: for a checkpoint that is read many times and was verified once."""
    token = _verifying.set(False)
    try:
        yield
    finally:
        _verifying.reset(token)


def start(dtype: torch.dtype, shape: Iterable[int]) -> int:
    """Return the checksum of a tensor before its first byte: of its dtype and shape."""
    return zlib.crc32(f"{dtype_name(dtype)} {list(shape)}".encode())


def extend(checksum: int, values: Tensor) -> int:
    """Return the checksum after further values of the tensor, in row-major order."""
    return zlib.crc32(raw_bytes(values), checksum)


def table(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Return the entry for a file's metadata. tensors: by their names in the file; those on meta get a placeholder.

    The result has the same length for the same names, so a placeholder can be overwritten in a file.
    """

    def checksum(values: Tensor) -> int:
        return 0 if values.is_meta else extend(start(values.dtype, values.shape), values)

    with ThreadPoolExecutor(_threads()) as pool:
        return encoded(dict(zip(tensors, pool.map(checksum, tensors.values()), strict=True)), metadata)


def encoded(checksums: Mapping[str, int], metadata: Mapping[str, str]) -> str:
    """Return the entry for a file's metadata, of checksums that are known."""
    every = {**checksums, _METADATA: _of_metadata(metadata), _FORMAT: VERSION}
    return json.dumps({name: f"{every[name]:08x}" for name in sorted(every)}, separators=(",", ":"))


def of_folder(checksums: Mapping[str, int]) -> str:
    """Return the entry that binds files whose tables hold their own tensors alone. checksums: of all files' tensors."""
    return f"{zlib.crc32(json.dumps(sorted(checksums.items())).encode()):08x}"


def of_configs(contents: Mapping[str, Any]) -> str:
    """The entry for the JSON files beside the tensors; of config.json, which users edit, quantization_config alone."""
    return json.dumps({name: f"{_of_json(name, contents[name]):08x}" for name in sorted(contents)})


def verify(paths: Iterable[Path]) -> int:
    """Compare every tensor of safetensors files with its checksum; returns how many were compared.

    paths: every file of a checkpoint. Those that another library wrote have no checksums, and nothing is compared then.

    Raises:
        ValueError: a tensor, or a header, is not what was written, or a file is of another checkpoint than the rest;
            names the file and the tensor.
    """
    work: list[tuple[StoredTensor, str]] = []
    tables = {path: check_names(path) for path in paths}
    _check_bound(tables)
    for path, wanted in tables.items():
        work += [(stored, wanted[name]) for name, stored in header(path).tensors.items()] if wanted else []
    work.sort(key=lambda pair: (pair[0].path, pair[0].start))

    def compare(pair: tuple[StoredTensor, str]) -> None:
        stored, wanted = pair
        found = _of_stored(stored)
        if f"{found:08x}" != wanted:
            raise ValueError(
                f"{stored.path}: {stored.name} is damaged, its checksum is {found:08x} and was {wanted} when it was "
                "written: copy or save the checkpoint again"
            )

    with ThreadPoolExecutor(_threads()) as pool:
        list(pool.map(compare, work))
    return len(work)


def check_names(path: Path) -> dict[str, str]:
    """Return the checksums in a file's header, none where another library wrote it.

    Raises:
        ValueError: the header is damaged, or a tensor has a name that was not written.
    """
    metadata, tensors = header(path)
    wanted = _read(path, metadata)
    if wanted and (other := sorted(tensors.keys() - wanted.keys())):
        raise ValueError(
            f"{path}: its header is damaged, {other[0]} was not written by that name: copy or save the checkpoint again"
        )
    return wanted


def _check_bound(tables: Mapping[Path, Mapping[str, str]]) -> None:
    """Raise ValueError for files of different checkpoints: what two tables both hold has one checksum."""
    known: dict[str, str] = {}
    for path, wanted in tables.items():
        first = next(iter(tables))
        if bool(wanted) != bool(tables[first]) or any(
            known.setdefault(n, found) != found for n, found in wanted.items()
        ):
            raise ValueError(
                f"{path}: was not written with {first.name} beside it, their checksums differ: the folder mixes two "
                "checkpoints; copy or save one of them again"
            )


def verify_configs(paths: Iterable[Path]) -> None:
    """Compare the JSON files beside safetensors files with the checksums in the headers.

    Raises:
        ValueError: names the JSON file.
    """
    for path in paths:
        metadata = header(path).metadata
        covered: dict[str, str] = json.loads(metadata.get(CONFIGS, "{}")) if _read(path, metadata) else {}
        for name, wanted in covered.items():
            beside = path.parent / name
            if not beside.is_file() or f"{_of_json(name, read_json(beside)):08x}" != wanted:
                what = "its quantization_config" if name == _CONFIG else "it"
                raise ValueError(
                    f"{beside}: {what} is not what was written with the weights: copy or save the checkpoint again"
                )


def identity(path: Path) -> str:
    """Return a checksum of everything in a safetensors file: of its header where that has checksums of the tensors."""
    metadata, tensors = header(path)
    found = zlib.crc32(json.dumps([path.stat().st_size, sorted(metadata.items())]).encode())
    if KEY not in metadata:
        for name in sorted(tensors):
            found = zlib.crc32(f"{name} {_of_stored(tensors[name]):08x}".encode(), found)
    return f"{found:08x}"


def _of_stored(stored: StoredTensor) -> int:
    found = start(stored.dtype, stored.shape)
    for piece in stored.pieces():
        found = extend(found, piece)
    return found


def _of_json(name: str, content: Mapping[str, Any]) -> int:
    part = content.get("quantization_config") if name == _CONFIG else content
    return zlib.crc32(json.dumps(part, sort_keys=True).encode())


def verify_unless_told(paths: Iterable[Path], *, configs: bool = False) -> None:
    """`verify`, with `verify_configs` first where configs is True, but for loads inside `not_verified()`."""
    if _verifying.get():
        paths = list(paths)
        if configs:
            verify_configs(paths)
        verify(paths)


def _read(path: Path, metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the checksums in a header, when those of the header itself hold; none where another library wrote it."""
    if KEY not in metadata and not any(f'"{_METADATA}":"' in text for text in metadata.values()):
        return {}
    try:
        wanted: dict[str, str] = json.loads(metadata[KEY])
        written_as = int(wanted.pop(_FORMAT, "1"), 16)
        intact = wanted[_METADATA] == f"{_of_metadata(metadata):08x}" and metadata.get("format", "pt") == "pt"
    except MALFORMED:
        intact = False
    else:
        if written_as > VERSION:
            raise ValueError(
                f"{path}: was written in format {written_as} of aoquant's checkpoints, and this aoquant reads up to "
                f"{VERSION}: install a newer one"
            )
    if not intact:
        raise ValueError(
            f"{path}: its header is damaged, the metadata's checksum differs: copy or save the checkpoint again"
        )
    return wanted


def _of_metadata(metadata: Mapping[str, str]) -> int:
    rest = sorted((k, v) for k, v in metadata.items() if k not in _BY_OTHERS)
    return zlib.crc32(json.dumps(rest).encode())


def _threads() -> int:
    return min(8, os.cpu_count() or 1)
