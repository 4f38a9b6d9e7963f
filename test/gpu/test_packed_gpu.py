"""The GEMM of packed FP4 matrices against float64, against the other backends, and row by row."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.gemm import scaled_mm
from support.gpu import BF16, CUDA, F16, F32, no_waiting
from torch import Tensor

from aoquant import backend, get_format
from aoquant.ops import codec

pytestmark = pytest.mark.gpu

PAIRS = (
    ("nvfp4", "nvfp4"),
    ("mxfp4", "mxfp4-floor"),
    ("xx-nvfp4", "xx-nvfp4-static:0.1"),
    ("xx-mxfp4", "xx-mxfp4"),
    ("mxfp4-quest", "mxfp4-quest"),
    ("qutlass-nvfp4", "qutlass-nvfp4"),
    ("te-nvfp4", "nvfp4-search"),
    ("fouroversix", "fouroversix"),
    ("nvfp4-none", "mxfp4"),
    ("nvfp4-row", "nvfp4"),
    ("fouroversix-row", "fouroversix"),
)
SHAPES = ((1, 64, 96), (65, 256, 2080), (300, 200, 1056))


def matrices(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(m + n + k)
    x, w = torch.randn(m, k, generator=g), torch.randn(n, k, generator=g) * 0.02
    return x.to(CUDA, dtype), w.to(CUDA, dtype), torch.randn(n, generator=g).to(CUDA, dtype)


def multiply(x_name: str, w_name: str, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    x_q, w_q = (codec.encode(get_format(f), t) for f, t in ((x_name, x), (w_name, w)))
    return scaled_mm(x_q, w_q, bias, x_name, w_name, "aoquant", [x.shape[0]], x.dtype)


@pytest.mark.parametrize(
    ("x_name", "w_name", "dtype"),
    [*((*p, BF16) for p in PAIRS), *((*p, d) for p in PAIRS[:2] for d in (F16, F32))],
    ids=str,
)
def test_every_backend_agrees_with_float64(x_name: str, w_name: str, dtype: torch.dtype) -> None:
    for m, n, k in SHAPES:
        x, w, bias = matrices(m, n, k, dtype)
        x_hat, w_hat = (
            get_format(f).decode(get_format(f).encode(t), F32).double() for f, t in ((x_name, x), (w_name, w))
        )
        exact = x_hat @ w_hat.t() + bias.double()
        got = {}
        for name, role in (("triton", "gemm"), ("reference", "gemm"), (None, None)):
            if name is None:
                got["routed"] = multiply(x_name, w_name, x, w, bias)
                continue
            with backend(name, role=role):
                got[name] = multiply(x_name, w_name, x, w, bias)
        for name, y in got.items():
            error = ((y.double() - exact).norm() / exact.norm()).item()
            assert error < {BF16: 3e-3, F16: 5e-4, F32: 2e-6}[dtype], f"{name} {m} {n} {k}: {error}"
        same = (got["triton"] == got["reference"]).double().mean().item()
        assert same > {BF16: 0.985, F16: 0.9, F32: 0.0}[dtype], f"{m} {n} {k}: {same}"


def test_a_row_does_not_depend_on_the_others() -> None:
    x, w, bias = matrices(513, 384, 1056, BF16)
    with backend("triton", role="gemm"):
        whole = multiply("mxfp4", "mxfp4", x, w, bias)
        for m in (1, 16, 63, 64, 65, 128, 300):
            assert torch.equal(multiply("mxfp4", "mxfp4", x[:m], w, bias), whole[:m]), m


def test_no_sync_and_every_mix_of_backends() -> None:
    x, w, bias = matrices(33, 256, 512, BF16)
    seen = []
    for quantize, gemm in itertools.product(("reference", "triton"), ("reference", "tensor-cores", "triton")):
        with backend(quantize, role="quantize"), backend(gemm, role="gemm"):
            for _ in range(2):  # the first call compiles
                with no_waiting():
                    seen.append(multiply("xx-mxfp4", "xx-mxfp4", x, w, bias))
    for y in seen:
        torch.testing.assert_close(y, seen[0], rtol=2.0**-7, atol=1e-3)
