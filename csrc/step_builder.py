"""How csrc/step becomes a shared library, and why it sometimes does not.

It is built beside the CUDA kernels, which its programs call; a C++ compiler and torch's headers are all it takes.
Unlike its neighbours the library is written against torch's C++ interface, since the stable ABI has no autograd; so it
holds the version of the torch that it was built with, and no other loads it. Building is an offer, never a condition:
an install goes on where a torch to come has other interfaces. AOQUANT_BUILD_CSRC=0 leaves it out too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from builder import source_symbol
from cpu_builder import compile_and_link
from setuptools.errors import CompileError

FOLDER = Path(__file__).resolve().parent / "step"
MODULE = "aoquant.ops._native_step"  # a library beside aoquant/ops/native_step.py, which loads it


def commands(torch: Any, compiler: str, target: Path, scratch: Path) -> tuple[list[list[str]], list[str]]:
    """Return what makes the object, and what links it."""
    root, made = Path(torch.__file__).parent, str(scratch / "step.o")
    include = root / "include"
    compiled = [
        compiler, "-c", str(FOLDER / "step.cpp"), "-o", made, "-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden",
        "-isystem", str(include), "-isystem", str(include / "torch" / "csrc" / "api" / "include"),
        f'-DAOQUANT_TORCH="{torch.__version__}"', f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-ffile-prefix-map={FOLDER.parent}=csrc", *(["-DAOQUANT_CUDA"] if torch.version.cuda else []),
    ]  # fmt: skip
    libraries = ("-ltorch_cpu", "-lc10", *(["-ltorch_cuda"] if torch.version.cuda else []))
    linked = [compiler, "-shared", f"-Wl,{source_symbol('_native_step')}", "-o", str(target), made]
    return [compiled], [*linked, f"-L{root / 'lib'}", *libraries]


def build(torch: Any, target: Path, scratch: Path) -> None:
    """Compile and link the library `target`; its object goes into `scratch`.

    Raises:
        CompileError: the compiler is missing, or failed.
    """
    try:
        compile_and_link(torch, target, scratch, f"the step library for torch {torch.__version__}", commands)
    except SystemExit as error:
        raise CompileError(str(error)) from None
