"""vLLM's library of CUDA kernels without vLLM: taken from its wheel, made small, loaded beside another PyTorch.

    pip download vllm==0.32.0 --no-deps --dest build        # 327 MB
    python benchmarks/engine_library.py build/vllm-0.32.0-*.whl build/vllm_kernels.so.xz

`_C_stable_libtorch.abi3.so` uses PyTorch's stable ABI, so it loads in other versions than the one it was built with.
It holds each kernel for many GPUs. What a Hopper GPU does not run, machine code of other architectures, is overwritten
with zeros, which xz makes vanish; code for sm_90 and PTX up to it stays where it was.
"""

from __future__ import annotations

import lzma
import struct
import sys
import zipfile
from pathlib import Path

LIBRARY = "vllm/_C_stable_libtorch.abi3.so"
FATBIN = struct.pack("<I", 0xBA55ED50)  # of a container; its entries are PTX or machine code of one architecture each
PTX, HOPPER = 1, 90


def for_hopper(library: bytes) -> bytes:
    """The library with zeros for what a Hopper GPU does not run."""
    data = bytearray(library)
    at = data.find(FATBIN)
    while at >= 0:
        _, _, header, size = struct.unpack_from("<IHHQ", data, at)
        entry, end = at + header, at + header + size
        while entry < end:
            kind, _, entry_header, length = struct.unpack_from("<HHIQ", data, entry)
            (architecture,) = struct.unpack_from("<I", data, entry + 28)
            if architecture != HOPPER and (kind != PTX or architecture > HOPPER):
                first = entry + entry_header
                data[first : first + length] = bytes(length)
            entry += entry_header + length
        at = data.find(FATBIN, end)
    return bytes(data)


def main(wheel: Path, out: Path) -> None:
    library = zipfile.ZipFile(wheel).read(LIBRARY)
    packed = lzma.compress(for_hopper(library), preset=6)
    out.write_bytes(packed)
    print(f"{LIBRARY}: {len(library) / 2**20:.1f} MiB, {len(packed) / 2**20:.1f} MiB packed for Hopper")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
