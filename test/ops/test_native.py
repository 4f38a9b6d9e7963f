"""The CUDA library's way from sources to operators, as far as it goes without a GPU: when it is built, what is said
when it is not.

nvcc compiles without a device, so the sources are compiled here for three architectures where nvcc is (slow). What the
kernels compute is test/gpu's business.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aoquant.ops import native, native_cpu, sources

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "csrc"))
import builder  # noqa: E402

CUDA_TORCH = SimpleNamespace(
    version=SimpleNamespace(cuda="13.0"), __version__="2.11.0+cu130", cuda=SimpleNamespace(is_available=lambda: False)
)
FAKE_NVCC = """#!/bin/sh
# says what nvcc says, and makes the file that -o names
if [ "$1" = --version ]; then echo "Cuda compilation tools, release $FAKE_RELEASE, V$FAKE_RELEASE.88"; exit; fi
echo "$@" >> "$FAKE_LOG"
while [ "$1" != -o ]; do shift; done
echo made > "$2"
"""
FAKE_TORCH = """
class version: cuda = "13.0"
class cuda:
    is_available = staticmethod(lambda: False)
__version__ = "2.11.0+cu130"
"""


@pytest.fixture
def fake_nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A CUDA 13.0 whose nvcc writes down its arguments."""
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(FAKE_NVCC)
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setenv("FAKE_RELEASE", "13.0")
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "nvcc.log"))
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    monkeypatch.delenv("AOQUANT_BUILD_CSRC", raising=False)
    return nvcc


def test_reasons_not_to_build(fake_nvcc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = builder.find_nvcc()
    assert nvcc == str(fake_nvcc)
    assert builder.why_not(CUDA_TORCH, nvcc) is None
    assert "--no-build-isolation" in (builder.why_not(None, nvcc) or "")
    cpu = SimpleNamespace(version=SimpleNamespace(cuda=None), __version__="2.13.0+cpu")
    assert "2.13.0+cpu is built without CUDA" in (builder.why_not(cpu, nvcc) or "")
    assert "nvcc is not on the path" in (builder.why_not(CUDA_TORCH, None) or "")
    monkeypatch.setenv("FAKE_RELEASE", "12.9")
    assert "nvcc is CUDA 12's and torch's runtime CUDA 13.0" in (builder.why_not(CUDA_TORCH, nvcc) or "")


def test_asked_to_build_or_not(
    fake_nvcc: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(builder, "import_torch", lambda: CUDA_TORCH)
    assert builder.wanted() and capsys.readouterr().out == ""
    monkeypatch.setenv("AOQUANT_BUILD_CSRC", "0")
    assert not builder.wanted()
    assert "not built (AOQUANT_BUILD_CSRC=0)" in capsys.readouterr().out
    monkeypatch.setattr(builder, "import_torch", lambda: None)
    monkeypatch.setenv("AOQUANT_BUILD_CSRC", "1")
    with pytest.raises(SystemExit, match="cannot be built: this build is isolated from torch"):
        builder.wanted()
    monkeypatch.delenv("AOQUANT_BUILD_CSRC")
    assert not builder.wanted()
    assert capsys.readouterr().out.count("\n") == 1
    monkeypatch.setenv("AOQUANT_BUILD_CSRC", "yes")
    with pytest.raises(SystemExit, match="got 'yes'"):
        builder.wanted()


def test_architectures(fake_nvcc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    away = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False))
    here = SimpleNamespace(
        cuda=SimpleNamespace(
            is_available=lambda: True, device_count=lambda: 2, get_device_capability=lambda i: [(9, 0), (8, 9)][i]
        )
    )
    assert builder.architectures(away, str(fake_nvcc)) == list(builder.ARCHITECTURES)
    assert builder.architectures(here, str(fake_nvcc)) == ["8.9", "9.0a"]
    monkeypatch.setenv("FAKE_RELEASE", "12.4")
    assert builder.architectures(away, str(fake_nvcc)) == ["8.0", "8.6", "8.9", "9.0a"]
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.9;9.0+PTX")
    assert builder.architectures(here, str(fake_nvcc)) == ["8.9", "9.0a"]
    assert builder.gencode("8.0+PTX") == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_80,code=compute_80",
    ]


def test_architectures_that_the_kernels_cannot_have(fake_nvcc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_devices(*capabilities: tuple[int, int]) -> SimpleNamespace:
        cuda = SimpleNamespace(
            is_available=lambda: True,
            device_count=lambda: len(capabilities),
            get_device_capability=capabilities.__getitem__,
        )
        return SimpleNamespace(version=CUDA_TORCH.version, __version__=CUDA_TORCH.__version__, cuda=cuda)

    nvcc = str(fake_nvcc)
    assert builder.architectures(with_devices((7, 5), (8, 6)), nvcc) == ["8.6"]
    assert "8.0 or later, and 7.5 is all there is" in (builder.why_not(with_devices((7, 5)), nvcc) or "")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.0 7.5;8.0;12.0a+PTX")
    assert builder.why_not(CUDA_TORCH, nvcc) is None
    assert builder.architectures(CUDA_TORCH, nvcc) == ["8.0", "12.0a+PTX"]
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.5+PTX")
    assert "7.5+PTX is all there is to build for" in (builder.why_not(CUDA_TORCH, nvcc) or "")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;Hopper")
    assert "has Hopper: give numbers" in (builder.why_not(CUDA_TORCH, nvcc) or "")


def test_a_build_that_asserts(monkeypatch: pytest.MonkeyPatch) -> None:
    def command() -> list[str]:
        return builder.compile_command("nvcc", Path("torch"), Path("a.cu"), Path("a.o"), ["9.0a"])

    monkeypatch.delenv("AOQUANT_ASSERT", raising=False)
    assert "-DAOQUANT_ASSERT" not in command()
    monkeypatch.setenv("AOQUANT_ASSERT", "1")
    assert "-DAOQUANT_ASSERT" in command()
    monkeypatch.setenv("AOQUANT_ASSERT", "on")
    with pytest.raises(SystemExit, match="got 'on'"):
        command()


def make_wheel(folder: Path, **environment: str) -> tuple[str, list[str], str]:
    """(file name, names inside, what was said) of the wheel that a copy of the sources makes."""
    folder.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "csrc", folder / "csrc")
    skip = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / "aoquant", folder / "aoquant", ignore=skip)
    (folder / "eval" / "assets").mkdir(parents=True)
    left = folder / "build" / "lib" / "aoquant" / "ops" / native.LIBRARY.name
    left.parent.mkdir(parents=True)
    left.touch()
    said = subprocess.run(
        [sys.executable, "setup.py", "bdist_wheel"], cwd=folder, env={**os.environ, **environment},
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel.name, zipfile.ZipFile(wheel).namelist(), said


def test_wheels(fake_nvcc: Path, tmp_path: Path) -> None:
    """Pure Python where torch has no CUDA, whatever an earlier build left; bound to the platform and to no Python, with
    the library in it, where both are there.
    """
    fake = tmp_path / "fake"
    (fake / "torch").mkdir(parents=True)
    (fake / "torch" / "__init__.py").write_text(FAKE_TORCH.replace('"13.0"', "None"))
    name, inside, said = make_wheel(tmp_path / "pure", PYTHONPATH=str(fake))
    assert name.endswith("-py3-none-any.whl") and "aoquant/ops/native.py" in inside
    assert native.LIBRARY.name not in [Path(n).name for n in inside]
    assert "CUDA kernels not built (torch 2.11.0+cu130 is built without CUDA" in said

    (fake / "torch" / "__init__.py").write_text(FAKE_TORCH)
    name, inside, said = make_wheel(tmp_path / "native", PYTHONPATH=str(fake), TORCH_CUDA_ARCH_LIST="7.5;8.0;9.0")
    assert "-py3-none-linux" in name and "aoquant/ops/_native.so" in inside
    assert "building CUDA kernels for 8.0, 9.0a with" in said and "not for 7.5, which is older" in said
    *compiled, linked = (tmp_path / "nvcc.log").read_text().splitlines()
    assert len(compiled) == len(builder.sources()) and all("-fmad=false" in line for line in compiled)
    symbol = sources.symbol("_native")
    assert (
        linked.startswith("-shared")
        and f"--defsym={symbol}=1" in linked
        and linked.endswith("-ltorch_cpu -ltorch_cuda")
    )


@pytest.mark.parametrize("module", [native, native_cpu], ids=["cuda", "cpu"])
def test_a_library_of_other_sources_is_not_loaded(module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any change of a source makes it one. Without sources, as in a wheel, it is that of the same build."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.ops, "load_library", lambda library: pytest.fail("loaded"))
    csrc, library = tmp_path / "csrc", tmp_path / module.LIBRARY.name
    shutil.copytree(ROOT / "csrc", csrc)
    mine = sources.symbol(library.stem)
    monkeypatch.setattr(sources, "CSRC", csrc)
    assert sources.symbol(library.stem) == mine and mine is not None
    library.write_bytes(b"ELF" + mine.encode() + b"\0")
    assert not sources.others(library)
    for changed in (
        csrc / ("decode.cuh" if module is native else "cpu/numbers.h"),
        csrc / "builder.py",
        csrc / "cpu_builder.py",
    ):
        before = changed.read_bytes()
        changed.write_bytes(before + b"\n")
        ours = changed.name != ("cpu_builder.py" if module is native else "builder.py")
        assert sources.others(library) == ours
        if ours:
            assert "was built for another version of aoquant: make " in module._load.__wrapped__(library)
        changed.write_bytes(before)
    shutil.rmtree(csrc)
    assert sources.symbol(library.stem) is None and not sources.others(library)


def test_reasons_for_a_missing_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent, broken = tmp_path / "absent.so", tmp_path / "broken.so"
    assert "installed without its CUDA library" in (native._load(absent) or "")
    broken.write_bytes(b"no library")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert native._load.__wrapped__(broken) == "aoquant's CUDA library needs a torch with CUDA"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setitem(sources.PARTS, broken.stem, ())
    broken.write_bytes((sources.symbol(broken.stem) or "").encode())
    assert "does not load (" in (native._load.__wrapped__(broken) or "")
    broken.write_bytes(b"")
    assert "does not load (" in (native._load.__wrapped__(broken) or "")


@pytest.mark.slow
@pytest.mark.skipif(builder.find_nvcc() is None, reason="nvcc is not here")
@pytest.mark.parametrize("source", builder.sources(), ids=lambda s: s.stem)
def test_sources_compile(source: Path, tmp_path: Path) -> None:
    """Against this torch's stable headers, which a CPU torch has too."""
    nvcc = builder.find_nvcc()
    assert nvcc is not None
    target = tmp_path / "object.o"
    root = Path(torch.__file__).parent
    command = builder.compile_command(nvcc, root, source, target, ["9.0a", "10.0a", "12.0a"])
    done = subprocess.run([*command, "-Werror", "all-warnings"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert target.stat().st_size > 0
