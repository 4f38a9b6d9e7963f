"""MSLK's kernels under both of their names, by contract: doubles of the operators under `torch.ops.mslk` and
`torch.ops.fbgemm`.

The doubles have the schemas of MSLK 1.1 and FBGEMM GenAI 1.6 and multiply what their arguments stand for; the kernels
themselves are run by test/gpu/test_int4_layouts_gpu.py. What is tested here: which package is asked, that either serves
alone, and what the adapter hands over.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from support.gemm import scaled_mm
from torch import Tensor

from aoquant import backend, explain, get_format
from aoquant.formats import layout
from aoquant.ops import Request
from aoquant.ops.gemm import mslk

PACKAGES = {"mslk": "mslk.gemm", "fbgemm": "fbgemm_gpu.experimental.gen_ai"}
E4M3, BF16, F32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32


def _int4(wq: Tensor, scale_GN: Tensor, zero_GN: Tensor) -> Tensor:
    """(N, K) float32 of MSLK's packed codes: q * s + z."""
    assert wq.dtype == torch.int8 and scale_GN.is_contiguous() and zero_GN.is_contiguous()
    q = (layout.unpack(wq.view(torch.uint8), 4, 2 * wq.shape[1]).int() ^ 8) - 8
    group = q.shape[1] // scale_GN.shape[0]
    s, z = (t.float().t().repeat_interleave(group, 1) for t in (scale_GN, zero_GN))
    return q * s + z


def bf16i4bf16_rowwise(x: Tensor, wq: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    assert x.dtype == BF16 and x.dim() == 2
    return (x.float() @ _int4(wq, scale, zero).bfloat16().float().t()).bfloat16()


def f8i4bf16_rowwise(xq: Tensor, wq: Tensor, x_scale: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    assert xq.dtype == E4M3 and x_scale.shape == (xq.shape[0],) and x_scale.dtype == F32
    tile = _int4(wq, scale, zero).to(scale.dtype).to(E4M3)
    return (x_scale.unsqueeze(1) * (xq.float() @ tile.float().t())).bfloat16()


def f8f8bf16_rowwise(
    xq: Tensor, wq: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Tensor | None = None, use_fast_accum: bool = True
) -> Tensor:
    assert xq.dtype == wq.dtype == E4M3 and x_scale.numel() == xq.shape[0] and w_scale.numel() == wq.shape[0]
    y = (w_scale.reshape(1, -1) * (x_scale.reshape(-1, 1) * (xq.float() @ wq.float().t()))).bfloat16()
    return y if bias is None else (y + bias).bfloat16()


SCHEMAS: dict[str, tuple[Callable[..., Tensor], str]] = {
    "bf16i4bf16_rowwise": (
        bf16i4bf16_rowwise,
        "(Tensor X, Tensor W, Tensor w_scale_group, Tensor w_zero_group) -> Tensor",
    ),
    "f8i4bf16_rowwise": (
        f8i4bf16_rowwise,
        "(Tensor XQ, Tensor WQ, Tensor x_scale, Tensor w_scale, Tensor w_zp) -> Tensor",
    ),
    "f8f8bf16_rowwise": (
        f8f8bf16_rowwise,
        "(Tensor XQ, Tensor WQ, Tensor x_scale, Tensor w_scale, Tensor? bias=None, bool use_fast_accum=True) -> Tensor",
    ),
}


@pytest.fixture(params=PACKAGES)
def package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """One of the two packages is installed, with operators that note who was called."""
    namespace, real = request.param, importlib.import_module

    def install(name: str) -> ModuleType:
        if name == PACKAGES[namespace]:
            return ModuleType(name)
        if name in PACKAGES.values():
            raise ImportError(name)
        return real(name)

    library = torch.library.Library(namespace, "FRAGMENT")
    for name, (function, schema) in SCHEMAS.items():
        library.define(name + schema)
        library.impl(name, function, "CPU")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(importlib, "import_module", install)
    mslk._find.cache_clear()
    yield namespace
    mslk._find.cache_clear()
    library._destroy()


WEIGHTS = [("int4-g128", "bias_after"), ("int4-bf16-g64", "bias_after"), ("int4-e4m3-g128", "fp8_bias_after"),
           ("int4-e4m3-row-g128", "fp8_bias_after"), ("fp8-row-mslk", "fp8_mslk"), ("fp8-row-mslk", "fp8_mslk_precise")]  # fmt: skip


def request(name: str, contract: str, **changed: Any) -> Request:
    given = {"x_format": None, "device": torch.device("cuda"), "dtype": BF16, "m": 1, "n": 64, "k": 256}
    return Request(contract, w_format=get_format(name), **(given | changed))


@pytest.mark.parametrize(("name", "contract"), WEIGHTS)
def test_either_package_serves_every_m(package: str, name: str, contract: str) -> None:
    for m in (1, 4096):
        assert explain(request(name, contract, m=m))[0] == ("mslk", "runs")
    found = mslk.operator(mslk._name(contract, get_format(name)))
    assert found is getattr(getattr(torch.ops, package), mslk._name(contract, get_format(name)))


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(("name", "contract"), WEIGHTS)
def test_the_adapter_computes_the_contract(
    monkeypatch: pytest.MonkeyPatch, name: str, contract: str, with_bias: bool
) -> None:
    fmt, act = get_format(name), get_format("fp8-row-mslk")
    x, w = torch.randn(6, 256).bfloat16(), torch.randn(64, 256).bfloat16()
    bias = torch.randn(64).bfloat16() if with_bias else None
    fp8 = contract != "bias_after"
    given = act.encode(x) if fp8 else x
    args = (given, fmt.encode(w), bias, act.name if fp8 else "", name, contract, [2, 3], BF16)
    with backend("reference"):
        want = scaled_mm(*args)
    monkeypatch.setattr("aoquant.ops.gemm.mslk._why_not.__code__", (lambda r: None).__code__)  # these are CPU tensors
    with backend("mslk"):
        got = scaled_mm(*args)
    assert got.shape == (2, 3, 64)
    assert torch.equal(got, want)


@pytest.mark.usefixtures("package")
def test_what_the_kernels_cannot_take_has_its_reason() -> None:
    assert "silently" in dict(explain(request("int4-g32", "bias_after")))["mslk"]
    assert "K % 32 == 0" in dict(explain(request("int4-g64", "bias_after", n=60, k=128)))["mslk"]
    assert "Hopper" in dict(explain(request("int4-g64", "bias_after", device=torch.device("cpu"))))["mslk"]


def test_without_a_package_both_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def missing(name: str) -> ModuleType:  # also where one of them is installed
        if name in PACKAGES.values():
            raise ModuleNotFoundError(f"No module named {name.partition('.')[0]!r}")
        return real(name)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(importlib, "import_module", missing)
    mslk._find.cache_clear()
    reason = mslk.why_not_operator("bf16i4bf16_rowwise")
    mslk._find.cache_clear()
    assert reason is not None
    assert "mslk.gemm: ModuleNotFoundError" in reason and "fbgemm_gpu" in reason and "install mslk-cuda" in reason
