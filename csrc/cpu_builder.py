"""How the CPU kernels of csrc/cpu become one shared library, and why they sometimes do not.

A C++ compiler and torch's headers are all it takes. The library sees LibTorch through its stable ABI and Python not at
all, as the CUDA library beside it. `level.cpp` is compiled once for each level of instructions, and the library chooses
when it runs, so that what was built on one machine serves another. Products and sums are not contracted
(-ffp-contract=off): where the reference rounds twice, so do the kernels.

Building is an offer, never a condition. AOQUANT_BUILD_CSRC=0 leaves these kernels out too. AOQUANT_SANITIZE=1 builds
them with AddressSanitizer and UndefinedBehaviorSanitizer, for `make sanitize-cpu`.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from builder import source_symbol

FOLDER = Path(__file__).resolve().parent / "cpu"
MODULE = "aoquant.ops._native_cpu"  # a library beside aoquant/ops/native_cpu.py, which loads it
TORCH_ABI = 0x020B << 48  # as csrc/builder.py's
_FLAGS = ("-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
_SANITIZED = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
_X86 = {
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mfma"),
    "baseline": ("-mavx2", "-mfma"),
}


def levels() -> dict[str, tuple[str, ...]]:
    """Name of each level of instructions -> the compiler's flags."""
    return _X86 if platform.machine() in ("x86_64", "AMD64") else {"baseline": ()}


def find_compiler() -> str | None:
    """$CXX, or the first usual one on the path."""
    return next(
        (found for name in (os.environ.get("CXX"), "g++", "c++", "clang++") if name and (found := shutil.which(name))),
        None,
    )


def why_not(torch: Any, compiler: str | None) -> str | None:
    """Why the kernels cannot be built here, and what to do; None when they can."""
    if torch is None:
        return "this build is isolated from torch: pip install --no-build-isolation . (with setuptools>=77 installed)"
    if platform.system() != "Linux":
        return f"they are built on Linux alone, not on {platform.system()}"
    if compiler is None:
        return "there is no C++ compiler on the path: install g++, or set CXX"
    if not (_include(torch) / "torch" / "csrc" / "stable" / "library.h").exists():
        return f"torch {torch.__version__} has no headers of the stable ABI"
    return None


def wanted(torch: Any) -> bool:
    """Whether this install builds the kernels. Says in one line why not."""
    reason = "AOQUANT_BUILD_CSRC=0" if os.environ.get("AOQUANT_BUILD_CSRC") == "0" else why_not(torch, find_compiler())
    if reason is not None:
        print(f"aoquant: CPU kernels not built ({reason}); the reference serves instead", flush=True)
    return reason is None


def _include(torch: Any) -> Path:
    return Path(torch.__file__).parent / "include"


def commands(torch: Any, compiler: str, target: Path, scratch: Path) -> tuple[list[list[str]], list[str]]:
    """(what makes the objects, what links them)."""
    library = [compiler, "-c", str(FOLDER / "library.cpp"), "-o", str(scratch / "library.o"), "-std=c++20", *_FLAGS]
    sanitized = _SANITIZED if os.environ.get("AOQUANT_SANITIZE") == "1" else ()
    compiled = [
        [
            *library,
            f"-I{FOLDER.parent}",
            "-isystem",
            str(_include(torch)),
            f"-DTORCH_TARGET_VERSION=0x{TORCH_ABI:016x}ull",
        ]
    ]
    for level, flags in levels().items():
        source, made = str(FOLDER / "level.cpp"), str(scratch / f"{level}.o")
        compiled.append([compiler, "-c", source, "-o", made, "-std=c++20", *_FLAGS, f"-DAOQUANT_LEVEL={level}", *flags])
    for command in compiled:  # messages name the source, wherever it was built
        command += [f"-ffile-prefix-map={FOLDER.parent}=csrc", *sanitized]
    objects = [command[command.index("-o") + 1] for command in compiled]
    root = Path(torch.__file__).parent / "lib"
    symbol = f"-Wl,{source_symbol('_native_cpu')}"
    return compiled, [compiler, "-shared", *sanitized, symbol, "-o", str(target), *objects, f"-L{root}", "-ltorch_cpu"]


def build(torch: Any, target: Path, scratch: Path) -> None:
    """Compile and link the library `target`; objects go into `scratch`.

    Raises:
        SystemExit: the compiler is missing, or failed.
    """
    compile_and_link(torch, target, scratch, f"CPU kernels ({', '.join(levels())})", commands)


def compile_and_link(torch: Any, target: Path, scratch: Path, what: str, commands: Callable[..., Any]) -> None:
    """Build `what`. commands: as this module's. Raises SystemExit as `build`."""
    compiler = find_compiler()
    if reason := why_not(torch, compiler):
        raise SystemExit(f"aoquant: {what} cannot be built: {reason}")
    assert compiler is not None
    scratch.mkdir(parents=True, exist_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    print(f"aoquant: building {what} with {compiler}", flush=True)
    compiled, linked = commands(torch, compiler, target, scratch)
    running = [subprocess.Popen(command) for command in compiled]
    failed = [process.returncode for process in running if process.wait()]
    if failed or subprocess.run(linked, check=False).returncode:
        raise SystemExit(f"aoquant: {compiler} failed on {what}; AOQUANT_BUILD_CSRC=0 leaves all kernels out")
