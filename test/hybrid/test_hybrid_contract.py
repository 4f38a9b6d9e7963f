"""The contract of backward's GEMMs: which pairs run on FP8 tensor cores, and that nothing else ever does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.hybrid_cases import data, layer, named
from support.training_cases import step

from aoquant import HybridConfig, backend
from aoquant.linear import law
from aoquant.ops import Request, backward, product, router
from aoquant.recipes import get_recipe

FP8 = "fp8_scaled_mm_precise"
E4M3, E5M2 = "te-fp8-tensor", "te-fp8-e5m2-tensor"
MIXES = ("mxfp8-nvfp4", "nvfp4-mxfp8", "fp8-hybrid", "nvfp4-training", "te-nvfp4-sr", "mxfp8-hp", "nvfp4-hp")


@pytest.mark.parametrize(
    ("first", "second", "wanted"),
    [
        (E4M3, E4M3, FP8),
        (E5M2, E4M3, FP8),
        (E4M3, E5M2, FP8),
        ("fp8-tensor", E4M3, FP8),
        (E5M2, E5M2, "aoquant"),
        ("te-fp8-1x128", "te-fp8-128x128", "aoquant"),
        ("mxfp8", "mxfp8", "aoquant"),
        ("fp8-row", "fp8-row", "aoquant"),
        (f"hadamard16+{E4M3}", f"hadamard16+{E4M3}", "aoquant"),
        (None, None, "aoquant"),
    ],
)
def test_the_contract_of_a_pair(first: str | None, second: str | None, wanted: str) -> None:
    assert law.contract(named(first), named(second)) == wanted


@pytest.fixture
def contracts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of every GEMM of two quantised operands."""
    seen: list[str] = []
    real = backward.Call

    def call(contract: str, *rest: Any) -> Any:
        seen.append(contract)
        return real(contract, *rest)

    monkeypatch.setattr(backward, "Call", call)
    monkeypatch.setattr(product, "Call", call)
    return seen


@pytest.mark.parametrize("name", MIXES)
def test_the_gemms_of_the_recipes(name: str, contracts: list[str]) -> None:
    linear_ = layer(get_recipe(name).prepare())
    step(linear_, *data())
    in_backward = [] if name.endswith("-hp") else [FP8 if name == "fp8-hybrid" else "aoquant"] * 2
    in_forward = "fp8_scaled_mm" if name == "fp8-hybrid" else "aoquant"
    assert contracts == [in_forward, *in_backward]
    assert (FP8 in str(linear_.prepared.recipe)) == (name == "fp8-hybrid")


def test_e5m2_by_e5m2_is_emulated(contracts: list[str]) -> None:
    step(layer(HybridConfig.fwd_bwd(E4M3, E5M2)), *data())
    assert contracts == ["aoquant"] * 3


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", [E4M3, "fp8-tensor", "fp8-row", "te-fp8-1x128"])
def test_nothing_under_the_contract_aoquant_reaches_an_fp8_accumulator(name: str, device: str) -> None:
    f = named(name)
    assert f is not None
    request = Request("aoquant", f.format, f.format, torch.device(device), torch.bfloat16, 128, 128, 128)
    sums_fp8 = [b for b in router._backends if b.role == "gemm" and ("scaled_mm" in b.name or "blockwise" in b.name)]
    assert len(sums_fp8) >= 3 and all(b.why_not(request) for b in sums_fp8)


@pytest.mark.parametrize("grad", [E4M3, E5M2])
def test_the_kernel_of_a_cpu_against_the_emulation(grad: str) -> None:
    """The same codes and scales; sums are added in another order, so that one value in a thousand rounds elsewhere."""
    config = HybridConfig.fwd_bwd(E4M3, E4M3).replaced(dgrad_grad_output=grad, wgrad_grad_output=grad)
    x, g = data(m=64)
    found = []
    for which in ("torch._scaled_mm", "reference"):
        linear_ = layer(config)
        leaf = x.detach().requires_grad_()
        y = linear_(leaf)
        with backend(which, role="gemm"):
            y.backward(g)
        assert leaf.grad is not None and linear_.weight.grad is not None
        found.append((leaf.grad, linear_.weight.grad))
    for kernel, emulated in zip(*found, strict=True):
        error = (kernel - emulated).double().square().sum() / emulated.double().square().sum()
        assert (kernel != emulated).float().mean() <= 1e-3 and error <= 10**-6.0
