"""The roundings of a GEMM's scales, in their order; and torch._scaled_mm where it has no kernel with a scale per row.

cuBLAS has none for few rows and a large K. The kernel with one scale sums the same products.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.gemm import scaled_mm
from support.linear_cases import BF16, BY_NAME, F32, assert_equal, data, layer, prepared
from torch import Tensor

from aoquant import backend, get_format
from aoquant.ops.gemm import torch_kernels as external

K, N = 64, 48


def call(name: str, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    fmt = get_format(name)
    with backend("torch._scaled_mm"):
        return scaled_mm(fmt.encode(x), fmt.encode(w), bias, name, name, "fp8_scaled_mm", [len(x)], torch.bfloat16)


@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("name", ["fp8-row", "fp8-tensor"])
@pytest.mark.parametrize("rows", [1, 3, 200])
def test_one_scale_serves_where_a_scale_per_row_has_no_kernel(
    monkeypatch: pytest.MonkeyPatch, name: str, rows: int, with_bias: bool
) -> None:
    x, w, bias = torch.randn(rows, K).bfloat16(), torch.randn(N, K).bfloat16(), torch.randn(N).bfloat16()
    given = bias if with_bias else None
    want = call(name, x, w, given)
    real, refused = torch._scaled_mm, []

    def picky(a: Tensor, b: Tensor, **kwargs: Any) -> Tensor:
        if kwargs["out_dtype"] != torch.float32:
            refused.append(len(a))
            raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmulAlgoGetHeuristic")
        assert kwargs["scale_a"].numel() == kwargs["scale_b"].numel() == 1 and kwargs.get("bias") is None
        return real(a, b, **kwargs)

    monkeypatch.setattr(torch, "_scaled_mm", picky)
    monkeypatch.setattr(external, "_refused", set())
    y = call(name, x, w, given)
    assert torch.equal(call(name, x, w, given), y)
    assert refused == [rows]  # and not asked again
    assert y.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(y, want, rtol=2**-7, atol=1e-5 * float(want.abs().max()))  # sums of another order


def test_the_inputs_scale_comes_before_the_weights() -> None:
    """(acc * alpha_x) * alpha_w: float32 products in another order have other last bits."""
    linear, x, fmt = layer(BY_NAME["fp8-row-act"], F32, bias=False), data("normal", 64, 53, F32), get_format("fp8-row")
    ex, ew = fmt.encode(x), fmt.encode(linear.weight.detach())
    assert ex.scale is not None and ew.scale is not None
    acc = ex.codes.float() @ ew.codes.float().t()
    y = prepared(BY_NAME["fp8-row-act"], linear)(x)
    assert_equal(y, (acc * ex.scale) * ew.scale.t())
    assert not torch.equal(y, (acc * ew.scale.t()) * ex.scale) and not torch.equal(y, acc * (ex.scale * ew.scale.t()))


def test_nvfp4_of_blackwell_rounds_the_product_of_the_outer_scales() -> None:
    linear, fmt = layer(BY_NAME["ao.nvfp4"], BF16, bias=False), get_format("nvfp4")
    x = data("normal", 64, 48, BF16)
    ex, ew = fmt.encode(x), fmt.encode(linear.weight.detach())
    assert ex.outer is not None and ew.outer is not None
    acc = (fmt.operand(ex, F32) @ fmt.operand(ew, F32).t()).bfloat16()
    y = prepared(BY_NAME["ao.nvfp4"], linear)(x)
    assert_equal(y, acc * (ex.outer * ew.outer).bfloat16())
    assert not torch.equal(y, (acc * (ex.outer * ew.outer)).bfloat16())


def test_int8_rounds_after_the_inputs_scale_and_after_the_weights() -> None:
    case = BY_NAME["ao.int8act-int8-row"]
    linear, x = layer(case, BF16, bias=False), data("normal", 64, 52, BF16)
    ex, ew = get_format("int8-row-native").encode(x), get_format("int8-row").encode(linear.weight.detach())
    assert ex.scale is not None and ew.scale is not None
    acc = (ex.codes.double() @ ew.codes.double().t()).float()
    y = prepared(case, linear)(x)
    assert_equal(y, ((acc * ex.scale).bfloat16() * ew.scale.t()).bfloat16())
    assert not torch.equal(y, ((acc * ex.scale) * ew.scale.t()).bfloat16())


def test_other_errors_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def failing(a: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(len(a))
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr(torch, "_scaled_mm", failing)
    for rows in (5, 64):
        with pytest.raises(RuntimeError, match="illegal memory"):
            call("fp8-row", torch.randn(rows, K).bfloat16(), torch.randn(N, K).bfloat16(), None)
    assert calls == [5, 64]


def test_rows_without_a_kernel_leave_one_scale_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal shapes, other scales: what cuBLAS refused for rows it still does for tensors, in the order of sums that
    torchao's layer has.
    """
    x, w, bias = torch.randn(3, K).bfloat16(), torch.randn(N, K).bfloat16(), torch.randn(N).bfloat16()
    real, asked = torch._scaled_mm, []

    def picky(a: Tensor, b: Tensor, **kwargs: Any) -> Tensor:
        if kwargs["scale_a"].numel() > 1:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmulAlgoGetHeuristic")
        asked.append(kwargs["out_dtype"])
        return real(a, b, **kwargs)

    monkeypatch.setattr(torch, "_scaled_mm", picky)
    monkeypatch.setattr(external, "_refused", set())
    call("fp8-row", x, w, bias)
    call("fp8-tensor", x, w, bias)
    assert asked == [torch.float32, torch.bfloat16]


def test_int8_weights_by_group_and_by_row_round_as_torchao_does() -> None:
    """Groups are multiplied as values, rows as codes, whose sums the scale multiplies."""
    x, w, bias = torch.randn(5, K).bfloat16(), torch.randn(N, K).bfloat16(), torch.randn(N).bfloat16()
    products = []
    for name in ("intx8-g32", "int8-row"):
        fmt = get_format(name)
        e = fmt.encode(w)
        assert e.scale is not None
        by_values = torch.mm(x, fmt.decode(e, BF16).t())
        by_codes = (
            torch.mm(x, fmt.integers(e).bfloat16().t()) * e.scale.bfloat16().flatten() if name == "int8-row" else None
        )
        want = by_values if by_codes is None else by_codes
        products.append((by_values, by_codes))
        assert_equal(scaled_mm(x, e, bias, "", name, "int8_rescale", [5], BF16), want + bias)
        assert_equal(scaled_mm(x, e, None, "", name, "int8_rescale", [5], BF16), want)
    assert products[1][1] is not None and not torch.equal(*products[1])


def test_the_zero_points_share_is_rounded_before_it_is_taken_off() -> None:
    x, w = torch.randn(5, K).bfloat16() + 1, torch.randn(N, K).bfloat16()
    ex, ew = get_format("int8-row-asym-native").encode(x), get_format("int8-row").encode(w)
    assert ex.scale is not None and ex.zero is not None and ew.scale is not None and bool((ex.zero != 0).all())
    acc, rows = ex.codes.long() @ ew.codes.long().t(), ew.codes.long().sum(1)
    want = (acc * ex.scale).bfloat16() - (ex.zero * ex.scale * rows).bfloat16()
    y = scaled_mm(ex, ew, None, "int8-row-asym-native", "int8-row", "int8_dynamic", [5], BF16)
    assert_equal(y, (want * ew.scale.flatten()).bfloat16())


def test_mslks_int4_rounds_before_the_bias_and_after_it() -> None:
    x, w, bias = torch.randn(2, 3, K).bfloat16(), torch.randn(N, K).bfloat16(), torch.randn(N).bfloat16()
    fmt = get_format("int4-g32")
    e = fmt.encode(w)
    acc = x.float() @ fmt.operand(e, BF16).float().t()
    for given, want in ((None, acc.bfloat16()), (bias, (acc.bfloat16() + bias).bfloat16())):
        assert_equal(scaled_mm(x, e, given, "", "int4-g32", "bias_after", [2, 3], BF16), want)
    assert not torch.equal((acc + bias).bfloat16(), (acc.bfloat16() + bias).bfloat16())
