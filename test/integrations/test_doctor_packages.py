"""The rows of `aoquant doctor` about packages: what is there, what only has the name, what is absent."""

from __future__ import annotations

import importlib.metadata
import sys
from types import ModuleType
from typing import Any

import pytest

from aoquant import cli
from aoquant.tools import doctor

NAMES = ("torch", "torchao", "triton", "mslk", "fbgemm-gpu", "qutlass", "transformers", "lm-eval")


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
    cli.main(["doctor"])
    printed = capsys.readouterr().out
    assert tuple(p.package for p in doctor.packages()) == NAMES
    for p in doctor.packages():
        assert p.serves and p.get and p.package in printed and p.get in printed
    for name in ("torch", "torchao", "transformers"):
        assert row(name)[1:3] == ("yes", importlib.metadata.version(name))


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
    assert row("qutlass")[1:3] == (found, version or "-")
    reason = dict(doctor.backends("cpu"))["qutlass"]
    assert reason.startswith("qutlass is not installed; ") == (found != "yes")
