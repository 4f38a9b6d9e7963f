"""Tensors in safetensors files, read and written one by one, so that memory depends on the largest tensor alone.

A file is eight bytes (the header's length, little endian), a JSON header (name: dtype, shape, data_offsets; and
"__metadata__", strings) and the data without gaps. A file whose header is written first can be filled in any order. The
library's `save_file` takes all tensors of a file at once, and its readers map whole files into memory.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

PIECE = 1 << 22  # bytes that a copy holds at a time
MALFORMED = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    IndexError,
    ArithmeticError,
    AssertionError,
    RecursionError,
)
_MOST = 1 << 63  # elements that a tensor can have, empty dimensions apart

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: bytes [start, start + size) of `path`."""

    path: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        """In bytes."""
        return prod(self.shape) * self.dtype.itemsize

    def read(self) -> Tensor:
        """Return the tensor, in memory of its own."""
        return _read(self, 0, self.size).view(self.dtype).view(self.shape)

    def rows(self, start: int, end: int) -> Tensor:
        """Rows start to end of the tensor's first dimension, in memory of their own."""
        row = self.size // self.shape[0] if self.shape[0] else 0
        return _read(self, start * row, (end - start) * row).view(self.dtype).view(end - start, *self.shape[1:])

    def pieces(self) -> Iterator[Tensor]:
        """The tensor's values in order, as flat tensors of at most `PIECE` bytes."""
        for offset in range(0, self.size, PIECE):
            yield _read(self, offset, min(PIECE, self.size - offset)).view(self.dtype)

    def write(self, values: Tensor, offset: int = 0) -> int:
        """Write values of this dtype, `offset` bytes behind the tensor's start; returns how many bytes they are."""
        raw = raw_bytes(values)
        assert values.dtype == self.dtype and offset + len(raw) <= self.size
        with open(self.path, "r+b") as file:
            file.seek(self.start + offset)
            file.write(raw)
        return len(raw)


def raw_bytes(values: Tensor) -> memoryview:
    """Return the bytes of a tensor's values in row-major order, as a file holds them."""
    if values.numel() == 0:
        return memoryview(b"")
    return values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return the SHA-256 of named tensors: of names, dtypes, shapes and values, in their order."""
    made = hashlib.sha256()
    for name, t in tensors:
        made.update(f"{name} {t.dtype} {tuple(t.shape)}".encode())
        made.update(raw_bytes(t))
    return made.hexdigest()


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in a header, such as "BF16"."""
    return _NAMES.get(dtype, str(dtype))


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn a failed read into a ValueError with the file's name: an OSError outside is about the file being written."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error}: check the disk and the file's permissions") from error


def read_json(path: Path) -> dict[str, Any]:
    """Return a file's JSON object. Raises ValueError: it cannot be read, or is damaged."""
    with reading(path):
        raw = path.read_bytes()
    try:
        content = json.loads(raw.decode())
    except (ValueError, RecursionError) as error:  # bytes that are no UTF-8 or no JSON, or JSON without an end of depth
        raise ValueError(f"{path}: damaged or truncated ({error}): copy or save the checkpoint again") from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{path}: must hold a JSON object, got {type(content).__name__}: copy or save the checkpoint again"
        )
    return content


def _read(stored: StoredTensor, offset: int, size: int) -> Tensor:
    """`size` bytes of a stored tensor, uint8."""
    if size == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    buffer = bytearray(size)
    with reading(stored.path), open(stored.path, "rb", buffering=0) as file:
        file.seek(stored.start + offset)
        view, done = memoryview(buffer), 0
        while done < size and (got := file.readinto(view[done:])):
            done += got
    if done < size:
        raise ValueError(f"{stored.path}: damaged or truncated, {size - done} bytes missing: copy the checkpoint again")
    return torch.frombuffer(buffer, dtype=torch.uint8)


class Header(NamedTuple):
    """What a file says of itself: metadata, and its tensors by name."""

    metadata: dict[str, str]
    tensors: dict[str, StoredTensor]


def header(path: Path) -> Header:
    """Return the header of a file.

    Raises:
        ValueError: the file cannot be read, is shorter or longer than its header says, its header is no safetensors
            header, or a dtype is unknown here.
    """
    with reading(path), open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        length = int.from_bytes(file.read(8), "little")
        text = file.read(min(length, size))
    try:
        if length > size - 8:
            raise ValueError(f"a header of {length} bytes in a file of {size}")
        content = json.loads(text)
        metadata: dict[str, str] = content.pop("__metadata__", {})
        if not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("its metadata holds more than strings")
        tensors, end = {}, 0
        for name, t in sorted(content.items(), key=lambda item: item[1]["data_offsets"]):
            if t["dtype"] not in _DTYPES:
                raise ValueError(f"{name} is stored as {t['dtype']}, which is none of {', '.join(_DTYPES)}")
            shape, (start, stop) = tuple(t["shape"]), t["data_offsets"]
            if not all(type(n) is int and n >= 0 for n in (*shape, start, stop)) or prod(filter(None, shape)) >= _MOST:
                raise ValueError(f"{name} names no shape")
            tensors[name] = StoredTensor(path, name, _DTYPES[t["dtype"]], shape, 8 + length + start)
            if start != end or start + tensors[name].size != stop:
                raise ValueError(f"{name} does not fill its place")
            end += tensors[name].size
        if 8 + length + end != size:
            raise ValueError(f"{8 + length + end} bytes promised, {size} there")
    except MALFORMED as error:  # bytes that are no JSON, JSON that is no header
        raise ValueError(f"{path}: damaged or truncated ({error}): copy or save the checkpoint again") from error
    return Header(metadata, tensors)


def reserve(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, StoredTensor]:
    """Write a file's header, with room for `tensors` (by dtype and shape); returns what to fill in."""
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))  # every tensor lies aligned
    content: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))}
    end = 0
    for name in order:
        t = tensors[name]
        start, end = end, end + t.numel() * t.dtype.itemsize
        content[name] = {"dtype": _NAMES[t.dtype], "shape": list(t.shape), "data_offsets": [start, end]}
    text = _encoded(content)
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return header(path).tensors


def replace_metadata(path: Path, metadata: Mapping[str, str]) -> None:
    """Write other metadata, of the same length, into the header of a file: its tensors stay where they are."""
    with open(path, "r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        text = _encoded({**json.loads(file.read(length)), "__metadata__": dict(sorted(metadata.items()))})
        assert len(text) <= length < len(text) + 8
        file.seek(8)
        file.write(text.ljust(length))


def sort_metadata(path: Path) -> None:
    """Put a file's metadata into the order of its keys, so that equal content is equal bytes.

    The safetensors library writes them in the order of a Rust HashMap, which is another one at every call.
    """
    replace_metadata(path, header(path).metadata)


def _encoded(content: Mapping[str, object]) -> bytes:
    """Return a header's JSON, in as many bytes as the safetensors library needs."""
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
