"""The checksum of a GGUF file: an entry of its metadata, `aoquant.crc32`, that llama.cpp leaves unread.

It is the CRC-32 of the whole file with eight zeros in the place of the checksum's own digits.
"""

import struct
import zlib
from pathlib import Path

from aoquant.files.safetensors_file import PIECE, reading

PLACEHOLDER = ("aoquant.crc32", "0" * 8)
_STRING = 8  # GGUF's type of the value
_HEAD = PLACEHOLDER[0].encode() + struct.pack("<IQ", _STRING, 8)
_WITHIN = 1 << 16  # the entry is the second of the file


def write(path: Path) -> None:
    """Put the checksum in the place of the placeholder."""
    at, found = _place(path), _crc(path)
    assert at is not None
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(f"{found:08x}".encode())


def verify(path: Path) -> None:
    """Compare a file with its checksum.

    Raises:
        ValueError: the file is damaged, or holds no checksum.
    """
    at = _place(path)
    if at is None:
        raise ValueError(
            f"{path}: holds no checksum, so nothing can be compared: another program or an earlier version wrote it, or "
            "its header is damaged"
        )
    with reading(path), open(path, "rb") as file:
        file.seek(at)
        wanted = file.read(8).decode(errors="replace")
    if (found := f"{_crc(path):08x}") != wanted:
        raise ValueError(
            f"{path}: is damaged, its checksum is {found} and was {wanted} when it was written: copy or export it again"
        )


def _place(path: Path) -> int | None:
    with reading(path), open(path, "rb") as file:
        at = file.read(_WITHIN).find(_HEAD)
    return None if at < 0 else at + len(_HEAD)


def _crc(path: Path) -> int:
    at, done, found = _place(path), 0, 0
    with reading(path), open(path, "rb") as file:
        while piece := file.read(PIECE):
            if at is not None and done <= at < done + len(piece):  # the first piece holds all of it
                piece = piece[: at - done] + PLACEHOLDER[1].encode() + piece[at - done + 8 :]
            found, done = zlib.crc32(piece, found), done + len(piece)
    return found
