"""PyTorch's block-scaled GEMMs by contract: doubles that check what the operators ask for, and multiply what their
arguments stand for.

Nothing here ran on a Blackwell GPU. What is tested is ours: which requests the adapter takes, what it hands over
(dtypes, shapes, swizzled scales, where the bias goes) and what it makes of the accumulators.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.gemm import scaled_mm
from torch import Tensor
from torch.nn import functional as F

from aoquant import backend, explain, get_format
from aoquant.formats import layout
from aoquant.formats.elements import from_e2m1, from_float8
from aoquant.formats.scales import e8m0_values
from aoquant.ops import Request

pytestmark = pytest.mark.no_poison  # float4 storage

NAME = "torch.scaled_mm.blocks"
BF16, F32 = torch.bfloat16, torch.float32
CUDA = torch.device("cuda")
PAIRS = [(f, c) for f in ("nvfp4", "nvfp4-static:0.001") for c in ("aoquant", "nvfp4_rescale")]
PAIRS += [(f, "aoquant") for f in ("nvfp4-none", "mxfp4", "mxfp8", "mxfp4-floor", "mxfp8-even")]


def request(name: str, contract: str = "aoquant", **changed: Any) -> Request:
    fmt = get_format(name)
    given = {"x_format": fmt, "w_format": fmt, "device": CUDA, "dtype": BF16, "m": 8, "n": 64, "k": 128}
    return Request(contract, **(given | changed))


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))


@pytest.mark.usefixtures("capability")
@pytest.mark.parametrize(("name", "contract"), PAIRS)
def test_a_blackwell_gpu_takes_it_first(name: str, contract: str) -> None:
    rows = explain(request(name, contract))
    assert dict(rows)[NAME] == "runs"
    assert dict(rows)["tensor-cores"] == "willing, lower priority"


@pytest.mark.usefixtures("capability")
@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"k": 144}, "K is a multiple of 32 and N of 16, got K = 144"),
        ({"n": 72}, "N = 72"),
        ({"device": torch.device("cpu")}, "need a Blackwell GPU"),
        ({"x_format": None}, "got high precision by nvfp4"),
        ({"x_format": get_format("mxfp4")}, "got mxfp4 by nvfp4"),
        ({"contract": "dequantize"}, "computes aoquant and nvfp4_rescale, not dequantize"),
    ],
)
def test_what_it_leaves_and_why(changed: dict[str, Any], reason: str) -> None:
    contract = changed.pop("contract", "aoquant") if "contract" in changed else "aoquant"
    assert reason in dict(explain(request("nvfp4", contract, **changed)))[NAME]


@pytest.mark.usefixtures("capability")
@pytest.mark.parametrize("x", ["nvfp4", "nvfp4-row", "nvfp4-none", "nvfp4-static:0.5"])
def test_outer_scales_of_the_two_sides_may_differ(x: str) -> None:
    """They are the epilogue's, so one for the tensor meets one a row."""
    assert dict(explain(request("nvfp4", x_format=get_format(x))))[NAME] == "runs"
    assert dict(explain(request("mxfp4", x_format=get_format("mxfp4-floor"))))[NAME] != "runs"


def test_other_gpus_and_e5m2_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert "need a Blackwell GPU" in dict(explain(request("nvfp4")))[NAME]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (12, 0))
    assert "got mxfp8-e5m2 by mxfp8-e5m2" in dict(explain(request("mxfp8-e5m2")))[NAME]


def values(codes_RK: Tensor, scale: Tensor, group: int) -> Tensor:
    """What a matrix of codes and its swizzled scales stand for, float32; checks both as the operator would."""
    codes_RK = codes_RK if codes_RK.is_contiguous() else codes_RK.t()
    assert codes_RK.is_contiguous()
    if codes_RK.dtype == torch.float4_e2m1fn_x2:
        v = from_e2m1(layout.unpack(codes_RK.view(torch.uint8), 4, 2 * codes_RK.shape[1]))
    else:
        v = from_float8(codes_RK, F32)
    rows, k = v.shape
    assert scale.dtype == (torch.float8_e4m3fn if group == 16 else torch.float8_e8m0fnu)
    assert scale.is_contiguous() and scale.numel() == -(-rows // 128) * 128 * -(-(k // group) // 4) * 4
    s_RG = layout.unswizzle_128x4(scale.flatten(), rows, k // group)
    s = s_RG.float() if group == 16 else e8m0_values(s_RG.view(torch.uint8))
    return v.view(rows, -1, group).mul(s.unsqueeze(-1)).flatten(1)


class Double:
    """Both operators; remembers the output dtypes and whether there was a bias."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[torch.dtype, bool]] = []
        monkeypatch.setattr(torch, "_scaled_mm", self.v1)
        monkeypatch.setattr(F, "scaled_mm", self.v2)

    def v1(
        self, a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, *, bias: Tensor | None, out_dtype: torch.dtype
    ) -> Tensor:
        assert sa.dtype == torch.float8_e4m3fn or a.dtype == torch.float8_e4m3fn
        return self.multiply(a, b, sa, sb, bias, out_dtype)

    def v2(
        self, a: Tensor, b: Tensor, sa: Tensor, ra: Any, sb: Tensor, rb: Any, za: Any, zb: Any,
        *, bias: Tensor | None, output_dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        assert ra == rb == F.ScalingType.BlockWise1x32
        assert za == zb == F.SwizzleType.SWIZZLE_32_4_4
        assert a.dtype == torch.float4_e2m1fn_x2
        return self.multiply(a, b, sa, sb, bias, output_dtype)

    def multiply(self, a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, bias: Tensor | None, out: torch.dtype) -> Tensor:
        assert a.stride(1) == 1 and b.stride(0) == 1 and a.dtype == b.dtype
        assert bias is None or (bias.dtype == out and out != F32)  # cuBLAS takes no bias with float32 outputs
        self.calls.append((out, bias is not None))
        group = 16 if sa.dtype == torch.float8_e4m3fn else 32
        acc = values(a, sa, group) @ values(b, sb, group).t()
        return (acc if bias is None else acc + bias.float()).to(out)


@pytest.mark.parametrize("bias_dtype", [None, BF16, F32], ids=["no bias", "bias", "float32 bias"])
@pytest.mark.parametrize(
    ("name", "activation", "contract"), [*((n, n, c) for n, c in PAIRS), ("nvfp4", "nvfp4-row", "aoquant")]
)
def test_it_computes_the_contract(
    monkeypatch: pytest.MonkeyPatch, name: str, activation: str, contract: str, bias_dtype: torch.dtype | None
) -> None:
    fmt, double = get_format(name), Double(monkeypatch)
    x, w = torch.randn(24, 160).bfloat16(), (torch.randn(48, 160) * 0.02).bfloat16()
    bias = None if bias_dtype is None else torch.randn(48).to(bias_dtype)
    args = get_format(activation).encode(x), fmt.encode(w), bias, activation, name, contract, [2, 12], BF16
    with backend("reference"):
        want = scaled_mm(*args)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    monkeypatch.setattr(
        "aoquant.ops.gemm.blackwell._why_not.__code__", (lambda r: None).__code__
    )  # these are CPU tensors
    with backend(NAME):
        got = scaled_mm(*args)
    assert got.shape == (2, 12, 48) and torch.equal(got, want)
    fused = contract == "aoquant" and fmt.alpha(fmt.encode(w)) is None and bias_dtype != F32
    assert double.calls == [(BF16 if fused or contract == "nvfp4_rescale" else F32, fused and bias is not None)]
