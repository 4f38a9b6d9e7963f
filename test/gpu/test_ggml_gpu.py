"""llama.cpp's product on a GPU: the kernel's sums are the reference's, to the last bit, on the GPU and on a CPU; so a
prepared layer computes there what the served file is defined by, whatever the number of rows.

python -m pytest -m gpu test/gpu/test_ggml_gpu.py
"""

from __future__ import annotations

import copy

import pytest
import torch
from support.gemm import scaled_mm
from torch import nn

from aoquant import QATConfig, backend, explain, get_format, quantize_
from aoquant.formats import Encoded
from aoquant.ops import Request
from aoquant.recipes import get_recipe

pytestmark = pytest.mark.gpu

BF16, CUDA = torch.bfloat16, torch.device("cuda")
WEIGHTS = ("q4_0", "q4_1", "q8_0")


def on_cpu(e: Encoded) -> Encoded:
    return Encoded(*(None if t is None else t.cpu() for t in e[:4]), e.k)


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16], ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("x_name", ["q8_0", "q8_0-x86"])
@pytest.mark.parametrize("w_name", WEIGHTS)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 32), (1, 48, 64), (7, 200, 1024), (100, 96, 2048), (1111, 520, 544)])
def test_the_kernel_is_the_contract(m: int, n: int, k: int, w_name: str, x_name: str, dtype: torch.dtype) -> None:
    """Outliers and biases of two dtypes included; the CPU's sums too."""
    generator = torch.Generator().manual_seed(m)
    x = torch.randn(m, k, generator=generator) * 2.0 ** torch.randint(-9, 9, (m, 1), generator=generator)
    w, bias = torch.randn(n, k, generator=generator) * 0.02, torch.randn(n, generator=generator)
    x[0, 3] = 1000.0
    e, f = get_format(x_name).encode(x.to(CUDA)), get_format(w_name).encode(w.to(CUDA))
    request = Request("ggml", get_format(x_name), get_format(w_name), CUDA, dtype, m, n, k)
    assert dict(explain(request))["triton-ggml"] == "runs"
    for b in (None, bias, bias.to(BF16)):
        rest = x_name, w_name, "ggml", [m], dtype
        got = scaled_mm(e, f, None if b is None else b.to(CUDA), *rest)
        with backend("reference", "gemm"):
            want = scaled_mm(e, f, None if b is None else b.to(CUDA), *rest)
        assert torch.equal(got, want)
        assert torch.equal(got.cpu(), scaled_mm(on_cpu(e), on_cpu(f), b, *rest))


@pytest.mark.parametrize("w_name", WEIGHTS)
def test_infinite_scales_spread_as_in_the_reference(w_name: str) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(40, 256, device=CUDA), torch.randn(72, 256, device=CUDA)
    x[3, 40], w[5, 70] = float("nan"), 1e9
    e, f = get_format("q8_0-x86").encode(x), get_format(w_name).encode(w)
    got = scaled_mm(e, f, None, "q8_0-x86", w_name, "ggml", [40], torch.float32)
    with backend("reference", "gemm"):
        want = scaled_mm(e, f, None, "q8_0-x86", w_name, "ggml", [40], torch.float32)
    assert want[3].isnan().all() and not want[5:].isnan().all()
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.nan_to_num(), want.nan_to_num())


def test_rows_do_not_depend_on_their_number() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(1024, 512, device=CUDA, dtype=BF16), torch.randn(384, 512, device=CUDA, dtype=BF16)
    e, f = get_format("q8_0-x86").encode(x), get_format("q4_0").encode(w)
    with backend("triton-ggml"):
        whole = scaled_mm(e, f, None, "q8_0-x86", "q4_0", "ggml", [1024], BF16)
        for m in (1, 16, 17, 256, 1000):
            part = Encoded(e.codes[:m], None if e.scale is None else e.scale[:m], None, None, 512)
            assert torch.equal(scaled_mm(part, f, None, "q8_0-x86", "q4_0", "ggml", [m], BF16), whole[:m])


@pytest.mark.parametrize("recipe", ["gguf-q4_0", "gguf-q8_0"])
def test_prepared_equals_converted_on_the_gpu_and_on_a_cpu(recipe: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 384), nn.GELU(), nn.Linear(384, 128)).to(CUDA)
    x = torch.randn(3, 20, 256, device=CUDA)
    quantize_(model, QATConfig(get_recipe(recipe).make()))
    y, reference = model(x), copy.deepcopy(model)
    y.square().mean().backward()
    with backend("reference"):  # encoders, decoders and products
        reference(x).square().mean().backward()
    for made, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        assert made.grad is not None and wanted.grad is not None and torch.equal(made.grad, wanted.grad)
    first = copy.deepcopy(model[0]).cpu()
    assert torch.equal(first(x.cpu()), model[0](x).cpu())
    quantize_(model, QATConfig(step="convert"))
    with torch.no_grad():
        assert torch.equal(model(x), y)
