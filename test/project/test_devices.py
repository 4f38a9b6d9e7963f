"""Every tensor that the source makes says where: one without `device=` would go to the process's default device."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils._device import _device_constructors

import aoquant

ROOT = Path(aoquant.__file__).parent
# what a default device changes, by torch's own list; generators and legacy constructors beside
FACTORIES = {f.__name__ for f in _device_constructors()} | {"Generator", "Tensor", "normal", "tensor"}
MODULES = {"Linear", "Embedding", "LayerNorm", "RMSNorm", "Conv1d", "Conv2d", "MultiheadAttention"}


def without_device(source: str) -> list[str]:
    """The calls in `source` that make a tensor on the default device."""
    tree = ast.parse(source)
    named = {
        alias.asname or alias.name: f"torch.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "torch"
        for alias in node.names
    }
    found, optional = [], set(_optional(tree))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        owner, _, name = ast.unparse(node.func).rpartition(".")
        owner, name = named.get(owner, owner), name if owner else named.get(name, "").removeprefix("torch.")
        makes = (owner in ("torch", "") and name in FACTORIES) or (owner == "torch.nn" and name in MODULES)
        given = {k.arg: ast.unparse(k.value) for k in node.keywords}
        if makes and (given.get("device", "None") == "None" or (given["device"], node) in optional):
            found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


def _optional(tree: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Every node in a function one of whose arguments is None where it is left out, beside the argument's name."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        of = function.args
        pairs = [*zip(of.args[len(of.args) - len(of.defaults) :], of.defaults, strict=True)]
        pairs += [(a, d) for a, d in zip(of.kwonlyargs, of.kw_defaults, strict=True) if d is not None]
        for argument, default in pairs:
            if ast.unparse(default) == "None":
                yield from ((argument.arg, node) for node in ast.walk(function))


def test_the_rule_sees_what_it_is_for() -> None:
    source = """
import torch
from torch import Tensor, arange, nn
from torch import zeros as blank
torch.empty(2, dtype=torch.int8), torch.eye(3, device="cpu"), arange(4), arange(4, device=x.device), blank(1)
torch.Generator(), torch.tensor([1.0]), x.new_empty(2), torch.zeros_like(x), nn.Linear(1, 1), nn.Linear(1, 1, device=d)
def f(d=None, *, e=None, g="cpu"):
    return torch.ones(1, device=d), torch.full((), 2, device=e), torch.zeros(1, device=g), torch.linspace(0, 1, device=None)
torch.rand(2), torch.as_tensor([1]), torch.randperm(4), Tensor([1.0]), torch.cat([x]), tensor(1), nn.Module()
"""
    seen = [line.partition(": ")[2].partition("(")[0] for line in without_device(source)]
    assert sorted(seen) == sorted(
        ["torch.empty", "arange", "blank", "torch.Generator", "torch.tensor", "nn.Linear", "torch.rand", "torch.as_tensor",
         "torch.randperm", "Tensor", "torch.ones", "torch.full", "torch.linspace"]
    )  # fmt: skip


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_no_tensor_is_made_on_the_default_device(path: Path) -> None:
    assert without_device(path.read_text(encoding="utf-8")) == []
