"""The rows of `aoquant doctor` about packages, there, in name alone or absent, and about devices."""

from __future__ import annotations

import importlib.metadata
import re
import sys
import tomllib
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from aoquant import cli, ops
from aoquant.tools import doctor

# row: the module that is imported, and its distribution
ROWS = {
    "torch": ("torch", "torch"),
    "torchao": ("torchao", "torchao"),
    "triton": ("triton", "triton"),
    "mslk": ("mslk.gemm", "mslk-cuda"),
    "fbgemm-gpu": ("fbgemm_gpu.experimental.gen_ai", "fbgemm-gpu-genai"),
    "qutlass": ("qutlass", "qutlass"),
    "transformers": ("transformers", "transformers"),
    "lm-eval": ("lm_eval", "lm_eval"),
}


def row(name: str) -> doctor.Package:
    return next(p for p in doctor.packages() if p.package == name)


def give(monkeypatch: pytest.MonkeyPatch, module: ModuleType | None, version: str | None) -> None:
    """Make `import qutlass` give the module, or fail, and its distribution have the version, or none."""
    real = importlib.metadata.version

    def told(name: str) -> str:
        if name != "qutlass":
            return real(name)
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", told)
    monkeypatch.setitem(sys.modules, "qutlass", module)


def test_every_package_has_a_row(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "recipes", lambda: [doctor.Tried("one", "yes", "yes", "bit-equal")])
    monkeypatch.setattr(ops, "backend_names", lambda: ["reference"])
    cli.main(["doctor"])
    printed = capsys.readouterr().out
    assert [p.package for p in doctor.packages()] == list(ROWS)
    for p in doctor.packages():
        assert p.serves and p.get and p.package in printed and p.get in printed
    for name in ("torch", "torchao", "transformers"):
        assert row(name)[1:3] == ("yes", importlib.metadata.version(name))


@pytest.mark.parametrize("name", ROWS)
def test_every_row_says_what_is_installed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the package, its module and version; without it, neither; and with a version alone, that it is broken."""
    path, distribution = ROWS[name]
    versions: dict[str, str] = {}

    def told(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    present = ModuleType(path)
    present.__spec__ = ModuleSpec(path, None)
    present.matmul_nvf4_bf16_tn = None  # what qutlass is known by
    with monkeypatch.context() as m:
        m.setattr(importlib.metadata, "version", told)
        m.setitem(sys.modules, path.partition(".")[0], None)
        assert row(name)[1:3] == ("no", "-")
        versions[distribution] = "9.8.7"
        found, version = row(name)[1:3]
        assert found.startswith("no: ") and version == "9.8.7"
        m.setitem(sys.modules, path, present)
        assert row(name)[1:3] == ("yes", "9.8.7")


def test_what_doctor_says_to_install_exists() -> None:
    """Each `aoquant[extra]` is one of pyproject's and brings the row's distribution."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    for p in doctor.packages():
        brought = project["dependencies"]
        for extra in re.findall(r"aoquant\[(\w+)\]", p.get):
            brought = project["optional-dependencies"][extra]
        distribution = ROWS[p.package][1].replace("_", "-")
        names = [re.match(r"[\w-]+", requirement).group() for requirement in brought]
        assert distribution in names or p.package == "qutlass", p


@pytest.mark.parametrize(
    ("symbols", "version", "found"),
    [
        (None, None, "no"),
        (None, "0.1.0", "no: qutlass cannot be imported (ModuleNotFoundError)"),
        ((), "0.0.0", "no: what is installed has no kernels"),
        (("matmul_nvf4_bf16_tn",), "0.2.0", "yes"),
        (("matmul_nvf4_bf16_tn",), None, "yes"),
    ],
    ids=["absent", "broken", "placeholder", "there", "there without metadata"],
)
def test_a_name_is_no_package(symbols: Any, version: Any, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = None if symbols is None else ModuleType("qutlass")
    for symbol in symbols or ():
        setattr(module, symbol, None)
    give(monkeypatch, module, version)
    monkeypatch.setattr(ops, "backend_names", lambda: ["qutlass"])  # each backend is tried with every recipe
    assert row("qutlass")[1:3] == (found, version or "-")
    reason = dict(doctor.backends("cpu"))["qutlass"]
    assert reason.startswith("qutlass is not installed; ") == (found != "yes")


def test_every_device_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = {
        "GPU 0": ("One", 9, 0, 80 << 30, "compute capability 9.0, 80 GiB"),
        "GPU 1": ("Two", 12, 1, 11.6 * 2**30, "compute capability 12.1, 12 GiB"),
    }
    names = ("name", "major", "minor", "total_memory")
    found = [SimpleNamespace(**dict(zip(names, gpu, strict=False))) for gpu in gpus.values()]
    for native, said in ((doctor.native, "no nvcc"), (doctor.native_cpu, "no compiler")):
        monkeypatch.setattr(native, "why_not", lambda said=said: said)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    without = dict(doctor.versions())
    assert (without["CUDA kernels"], without["CPU kernels"]) == ("no nvcc", "no compiler") and "GPU" in without
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: found[i])
    rows = dict(doctor.versions())
    assert rows == {k: v for k, v in without.items() if k != "GPU"} | {
        row: f"{name}, {about}" for row, (name, *_, about) in gpus.items()
    }


def test_the_device_is_a_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for there, device in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert doctor.default_device() == device


def test_bfloat16_is_slow_on_any_cpu_without_its_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, slow in (("AVX2", True), ("DEFAULT", True), ("AVX512", False), ("AVX512_BF16", False)):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda name=capability: name)
        assert [doctor.slow_in_bfloat16(device) for device in ("cpu", "cpu:0", "cuda:0")] == [slow, slow, False]
