"""How the CUDA kernels of this folder become one shared library, and why they sometimes do not.

The kernels see LibTorch through its stable ABI alone and Python not at all. So one library serves every Python and
every torch from TORCH_ABI on, `torch.ops.load_library` reads it, and nothing is asked of `torch.utils.cpp_extension`:
nvcc compiles each source and links them. Multiply and add are not contracted (-fmad=false), because the bytes have to
be the reference's; a kernel that wants a fused multiply-add says so (`__fmaf_rn`).

Building is an offer, never a condition: without nvcc or without a CUDA torch the install goes on without kernels and
says why. AOQUANT_BUILD_CSRC=1 makes that an error, =0 leaves the kernels out. TORCH_CUDA_ARCH_LIST chooses
architectures as it does for other extensions; without it, those of the devices at hand, or every architecture known
here. What is older than the sources can be compiled for is left out, and said.

AOQUANT_ASSERT=1 builds a slower library for debugging, in which kernels check their bounds (check.cuh).
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
MODULE = "aoquant.ops._native"  # a library beside aoquant/ops/native.py, which loads it
TORCH_ABI = 0x020B << 48  # torch 2.11's stable ABI, the oldest torch that aoquant takes
ARCHITECTURES = ("8.0", "8.6", "8.9", "9.0a", "10.0a", "12.0a")
ARCHITECTURE = re.compile(r"(\d+)\.(\d)[af]?(\+PTX)?")
OLDEST = (8, 0)  # __reduce_max_sync
NEWEST = {"10.0a": (12, 8), "12.0a": (12, 8)}  # the nvcc that first knew an architecture, where older ones are around


def source_symbol(library: str) -> str:
    """The linker's flag that writes into a library ("_native", "_native_cpu") which sources it was built from."""
    symbol = runpy.run_path(str(FOLDER.parent / "aoquant" / "ops" / "sources.py"))["symbol"]
    return f"--defsym={symbol(library)}=1"


def sources() -> list[Path]:
    """Every .cu of this folder."""
    return sorted(FOLDER.glob("*.cu"))


def find_nvcc() -> str | None:
    """nvcc under CUDA_HOME, on the path, or where CUDA is usually installed."""
    homes = [home for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")) if home]
    return next(
        (found for home in homes if (found := shutil.which("nvcc", path=str(Path(home) / "bin")))),
        shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin"),
    )


def nvcc_version(nvcc: str) -> tuple[int, int]:
    """(major, minor)."""
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    match = re.search(r"release (\d+)\.(\d+)", said)
    assert match, said
    return int(match[1]), int(match[2])


def import_torch() -> Any:
    """torch, or None: an isolated build has setuptools alone."""
    try:
        import torch
    except ImportError:
        return None
    return torch


def why_not(torch: Any, nvcc: str | None) -> str | None:
    """Why the kernels cannot be built here, and what to do; None when they can."""
    if torch is None:
        return "this build is isolated from torch: pip install --no-build-isolation . (with setuptools>=77 installed)"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA: install a CUDA torch"
    if nvcc is None:
        return f"nvcc is not on the path: install CUDA {torch.version.cuda}'s compiler, or set CUDA_HOME"
    major = nvcc_version(nvcc)[0]
    if major != int(torch.version.cuda.split(".")[0]):
        return f"nvcc is CUDA {major}'s and torch's runtime CUDA {torch.version.cuda}: set CUDA_HOME to a CUDA of torch's major version"
    chosen = chosen_architectures(torch)
    if strange := [a for a in chosen if not ARCHITECTURE.fullmatch(a)]:
        return f"TORCH_CUDA_ARCH_LIST has {', '.join(strange)}: give numbers, such as 8.0;9.0"
    if chosen and not any(map(new_enough, chosen)):
        return f"the kernels need compute capability {OLDEST[0]}.{OLDEST[1]} or later, and {', '.join(chosen)} is all there is to build for"
    return None


def wanted() -> bool:
    """Whether this install builds the kernels. Says in one line why not.

    Raises:
        SystemExit: AOQUANT_BUILD_CSRC=1, and they cannot be built; or it is neither 0, 1 nor unset.
    """
    asked = os.environ.get("AOQUANT_BUILD_CSRC", "")
    if asked not in ("", "0", "1"):
        raise SystemExit(f"AOQUANT_BUILD_CSRC must be 1 (build or fail), 0 (leave out) or unset, got {asked!r}")
    reason = "AOQUANT_BUILD_CSRC=0" if asked == "0" else why_not(import_torch(), find_nvcc())
    if reason is None:
        return True
    if asked == "1":
        raise SystemExit(f"aoquant: AOQUANT_BUILD_CSRC=1, but the CUDA kernels cannot be built: {reason}")
    print(f"aoquant: CUDA kernels not built ({reason}); Triton's and the reference serve instead", flush=True)
    return False


def chosen_architectures(torch: Any) -> list[str]:
    """ "9.0a" and the like: what TORCH_CUDA_ARCH_LIST names, or the devices at hand; [] when neither says.

    Hopper is always built as 9.0a: the instructions that the decode kernels are made of exist under that name alone.
    """
    if listed := os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip("; ,"):
        return ["9.0a" if a in ("9.0", "9.0+PTX") else a for a in re.split(r"[;, ]+", listed)]
    if torch.cuda.is_available():
        found = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
        return [f"{major}.{minor}{'a' if major >= 9 else ''}" for major, minor in sorted(found)]
    return []


def new_enough(architecture: str) -> bool:
    """Whether the sources can be compiled for it."""
    match = ARCHITECTURE.fullmatch(architecture)
    return match is not None and (int(match[1]), int(match[2])) >= OLDEST


def architectures(torch: Any, nvcc: str) -> list[str]:
    """Those that are chosen and new enough, or all that this nvcc knows."""
    if chosen := chosen_architectures(torch):
        return [a for a in chosen if new_enough(a)]
    version = nvcc_version(nvcc)
    return [a for a in ARCHITECTURES if version >= NEWEST.get(a, (0, 0))]


def gencode(architecture: str) -> list[str]:
    """nvcc's flags for "9.0a"; "9.0+PTX" adds code that later devices compile."""
    number, plus, _ = architecture.partition("+PTX")
    digits = number.replace(".", "")
    flags = [f"-gencode=arch=compute_{digits},code=sm_{digits}"]
    return [*flags, f"-gencode=arch=compute_{digits},code=compute_{digits}"] if plus else flags


def assertions() -> list[str]:
    """nvcc's flags for AOQUANT_ASSERT.

    Raises:
        SystemExit: it is neither 0, 1 nor unset.
    """
    asked = os.environ.get("AOQUANT_ASSERT", "")
    if asked not in ("", "0", "1"):
        raise SystemExit(f"AOQUANT_ASSERT must be 1 (kernels check their bounds), 0 or unset, got {asked!r}")
    return ["-DAOQUANT_ASSERT"] if asked == "1" else []


def compile_command(nvcc: str, torch_root: Path, source: Path, target: Path, archs: Sequence[str]) -> list[str]:
    """nvcc's arguments that make an object of one source."""
    return [
        nvcc, "-c", str(source), "-o", str(target), "-std=c++17", "-O3", "-fmad=false", "-lineinfo",
        "-Xcompiler", "-fPIC,-fvisibility=hidden", f"-I{FOLDER}", "-isystem", str(torch_root / "include"),
        "-DUSE_CUDA", *assertions(), f"-DTORCH_TARGET_VERSION=0x{TORCH_ABI:016x}ull",
        *(flag for a in archs for flag in gencode(a)),
    ]  # fmt: skip


def link_command(nvcc: str, torch_root: Path, objects: Sequence[Path], target: Path) -> list[str]:
    """nvcc's arguments that make the library. It has no search path: torch is loaded before it, and with torch its
    libraries.
    """
    libraries = [f"-l{name}" for name in ("torch_cpu", "torch_cuda")]
    return [
        nvcc, "-shared", "-cudart", "shared", "-Xlinker", source_symbol("_native"), "-o", str(target), *map(str, objects),
        f"-L{torch_root / 'lib'}", *libraries
    ]  # fmt: skip


def build(target: Path, scratch: Path) -> None:
    """Compile every source and link the library `target`; objects go into `scratch`."""
    torch, nvcc = import_torch(), find_nvcc()
    if reason := why_not(torch, nvcc):
        raise SystemExit(f"aoquant: the CUDA kernels cannot be built: {reason}")
    assert nvcc is not None
    root, archs = Path(torch.__file__).parent, architectures(torch, nvcc)
    scratch.mkdir(parents=True, exist_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    print(f"aoquant: building CUDA kernels for {', '.join(archs)} with {nvcc}", flush=True)
    if older := [a for a in chosen_architectures(torch) if a not in archs]:
        print(f"aoquant: not for {', '.join(older)}, which is older than the kernels can be", flush=True)
    objects = [scratch / f"{source.stem}.o" for source in sources()]
    commands = [compile_command(nvcc, root, s, o, archs) for s, o in zip(sources(), objects, strict=True)]
    running = [subprocess.Popen(command) for command in commands]  # few sources: all at once
    failed = [source.name for source, process in zip(sources(), running, strict=True) if process.wait()]
    if failed:
        raise SystemExit(f"aoquant: nvcc failed on {', '.join(failed)}")
    subprocess.run(link_command(nvcc, root, objects, target), check=True)
