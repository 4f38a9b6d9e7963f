"""Versions of torchao: the proved one has its golden file, its configs are refused under any other, and nothing is
imported that a later one lacks.
"""

from __future__ import annotations

import ast
import importlib.metadata
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from support.linear_cases import BY_NAME
from torch import nn

import aoquant
from aoquant import MXFP4WeightConfig, QATConfig, quantize_
from aoquant.targets import PROVED, resolve

GOLDEN = sorted((Path(__file__).resolve().parent.parent / "golden").rglob("*.safetensors"))
CONFIGS = [case.config for case in BY_NAME.values() if type(case.config).__module__.startswith("torchao.")]
DELETED = ("torchao.kernel", "torchao.sparsity", "torchao.dtypes")  # by torchao's main of 2026-08-21


def installed(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name == "torchao" else real(name))


@pytest.mark.parametrize(
    "version", ["0.17.0", "0.19.0", "0.19.0.dev20261101+cu130", "0.18.0+git4a5b", "0.180.0", "1.0.0"]
)
def test_every_torchao_config_is_refused_under_a_version_that_was_not_proved(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, version)
    for config in CONFIGS:
        with pytest.raises(
            ValueError, match=rf"{type(config).__name__}: torchao .* was not proved exact.*install torchao 0\.18"
        ):
            resolve(config)
    model = nn.Sequential(nn.Linear(64, 32, dtype=torch.bfloat16))
    before = model[0]
    with pytest.raises(ValueError, match=r"the model is unchanged(.|\n)*was not proved exact"):
        quantize_(model, QATConfig(next(iter(CONFIGS)), step="prepare"))
    assert model[0] is before
    quantize_(model, QATConfig(MXFP4WeightConfig(), step="prepare"))  # a format of its own is as exact as ever


@pytest.mark.parametrize("version", ["0.18.0", "0.18.1", "0.18.0+cu130"])
def test_the_proved_version_is_taken(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, version)
    for config in CONFIGS:
        resolve(config)


def test_golden_files_name_the_proved_versions() -> None:
    recorded = set()
    for path in GOLDEN:
        with safe_open(path, "pt") as file:
            recorded.add(file.metadata()["torchao"].rpartition(".")[0])
    assert recorded == set(PROVED)


def test_nothing_is_imported_that_a_later_torchao_deletes() -> None:
    for path in Path(aoquant.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [f"{node.module}.{a.name}" for a in node.names] if isinstance(node, ast.ImportFrom) else []
            assert not [n for n in names if n.startswith(DELETED)], path
