"""Converted torchao layers whose kernel is missing are named at convert, and those that run are not."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from aoquant import QATConfig, ops, quantize_
from aoquant.recipes import get_recipe
from aoquant.targets import kernels, resolve

MISSING = {  # on a CPU: what the kernel needs
    "torchao-int4-g128": r"torchao's Int4Tensor.*Hopper GPU.*package mslk-cuda.*on cpu",
    "torchao-fp8-int4-plain": r"torchao's Int4Tensor.*Hopper GPU.*package mslk-cuda.*on cpu",
    "torchao-fp8-mslk": r"torchao's Float8Tensor.*Hopper GPU.*package mslk-cuda.*on cpu",
    "torchao-fp8-block": r"torchao's Float8Tensor.*needs a CUDA device.*package triton.*on cpu",
}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 128), nn.Linear(128, 128)).bfloat16()


@pytest.mark.parametrize("recipe", MISSING)
@pytest.mark.parametrize("ptq", [True, False], ids=["ptq", "convert"])
def test_a_missing_kernel_is_named_at_convert(recipe: str, ptq: bool) -> None:
    m, x = model(), torch.randn(4, 256).bfloat16()
    if not ptq:
        with warnings.catch_warnings(action="error"):
            quantize_(m, QATConfig(recipe, step="prepare"))
            m(x).sum().backward()  # a prepared model runs
    with pytest.warns(UserWarning, match=r"2 converted layer\(s\), such as 0, are " + MISSING[recipe]):
        quantize_(m, recipe if ptq else QATConfig(step="convert"))
    with pytest.raises((AttributeError, TypeError, AssertionError)), torch.no_grad():
        m(x)


@pytest.mark.parametrize("recipe", ["torchao-fp8", "torchao-int8", "torchao-int4-cpu", "int4-g128"])
def test_kernels_that_run_are_not_named(recipe: str) -> None:
    m = model()
    with warnings.catch_warnings(action="error"):
        quantize_(m, recipe)
    with torch.no_grad():
        m(torch.randn(4, 256).bfloat16())


@pytest.mark.parametrize(("said", "runs"), [("runs", True), ("willing, lower priority", True), ("needs a GPU", False)])
def test_a_kernel_that_would_run_is_not_missing(said: str, runs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[ops.Request]()

    def explain(request: ops.Request) -> list[tuple[str, str]]:
        asked.append(request)
        return [(name, said) for name, _ in kernels._KERNELS.values()]

    monkeypatch.setattr(ops, "explain", explain)
    target = resolve(get_recipe("torchao-int4-g128").make())
    found = kernels.why_not_run(target, torch.device("cpu"), torch.bfloat16, 128, 256)
    assert (found is None) == runs
    ((r,),) = [asked]
    assert (r.m, r.n, r.k, r.dtype, r.device.type) == (64, 128, 256, torch.bfloat16, "cpu")
    assert (r.contract, r.x_format, r.w_format.name) == (target.recipe.contract, None, "int4-g128")
