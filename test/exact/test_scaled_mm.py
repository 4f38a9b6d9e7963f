"""torch._scaled_mm where it has no kernel: cuBLAS with a bias, few rows and many columns. More rows have one, and their first are asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from aoquant import backend, get_format, ops

K, N = 64, 48


def call(name: str, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    fmt = get_format(name)
    parts = ops.to_parts(fmt.encode(x)), ops.to_parts(fmt.encode(w))
    with backend("torch._scaled_mm"):
        return ops.scaled_mm(*parts, bias, name, name, "fp8_scaled_mm", [len(x)], K, torch.bfloat16)


@pytest.mark.parametrize("name", ["fp8-row", "fp8-tensor"])
@pytest.mark.parametrize("rows", [1, 3, 31])
def test_few_rows_are_padded_where_there_is_no_kernel(monkeypatch: pytest.MonkeyPatch, name: str, rows: int) -> None:
    x, w, bias = torch.randn(rows, K).bfloat16(), torch.randn(N, K).bfloat16(), torch.randn(N).bfloat16()
    want, real, asked = call(name, x, w, bias), torch._scaled_mm, []

    def picky(a: Tensor, *args: Any, bias: Tensor | None, **kwargs: Any) -> Tensor:
        asked.append(len(a))
        if bias is not None and len(a) < 32:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmulAlgoGetHeuristic")
        return real(a, *args, bias=bias, **kwargs)

    monkeypatch.setattr(torch, "_scaled_mm", picky)
    assert torch.equal(call(name, x, w, bias), want)
    assert asked == [rows, 32]
    call(name, x, w, None)
    assert asked == [rows, 32, rows]


def test_other_errors_and_large_inputs_are_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def failing(a: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(len(a))
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED" if len(a) > 31 else "CUDA error: an illegal memory access")

    monkeypatch.setattr(torch, "_scaled_mm", failing)
    for rows in (5, 64):
        with pytest.raises(RuntimeError):
            call("fp8-row", torch.randn(rows, K).bfloat16(), torch.randn(N, K).bfloat16(), None)
    assert calls == [5, 64]
