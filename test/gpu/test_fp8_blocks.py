"""fp8 in blocks on a GPU: torchao's converted layer, its Triton kernel and the CPU's definition of both.

python -m pytest -m gpu test/gpu/test_fp8_blocks.py
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerBlock
from torchao.quantization import quantize_ as torchao_quantize_
from torchao.quantization.quantize_.common import KernelPreference

from aoquant import QATConfig, backend, quantize_
from aoquant.report.measure import sqnr

pytestmark = pytest.mark.gpu
BASE = Float8DynamicActivationFloat8WeightConfig(granularity=[PerBlock([1, 128]), PerBlock([128, 128])])
# torchao's kernel is tuned for each N and K, half a minute once a process: the tests of a shape go together
SHAPES = [
    pytest.param(*shape, marks=pytest.mark.xdist_group(f"{shape[1]}x{shape[2]}"))
    for shape in ((3, 256, 384), (64, 512, 1024), (256, 4096, 4096))
]


def model(n: int, k: int, *, bias: bool = True) -> nn.Sequential:
    return nn.Sequential(nn.Linear(k, n, bias=bias, dtype=torch.bfloat16, device="cuda"))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_prepared_equals_converted_and_torchaos_own(m: int, n: int, k: int, bias: bool) -> None:
    """Three layers, one kernel: equal outputs; equal bytes of the weight."""
    qat = model(n, k, bias=bias)
    theirs = copy.deepcopy(qat)
    torchao_quantize_(theirs, BASE)
    quantize_(qat, QATConfig(BASE))
    x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
    y = qat(x)
    assert torch.equal(y, theirs(x))
    assert torch.equal(qat(x.view(1, m, k)), theirs(x.view(1, m, k)))
    quantize_(qat, QATConfig(step="convert"))
    assert torch.equal(y, qat(x))
    mine: Any = qat[0].weight
    other: Any = theirs[0].weight
    assert torch.equal(mine.qdata.view(torch.uint8), other.qdata.view(torch.uint8))
    assert torch.equal(mine.scale, other.scale)
    assert mine.kernel_preference == KernelPreference.TORCH


@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_reference_and_kernel_differ_by_the_order_of_additions(m: int, n: int, k: int) -> None:
    """The same operands, another sum of each 128 products: Hopper's fp8 sums keep fewer bits than float32."""
    qat = model(n, k)
    quantize_(qat, QATConfig(BASE))
    x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad(), backend("torchao.blockwise"):
        kernel = qat(x)
    with torch.no_grad(), backend("reference"):
        reference = qat(x)
    found = sqnr(reference, kernel)
    print(f"reference against kernel, {m} x {n} x {k}: {found:.1f} dB")
    assert found > 50


def test_codes_are_the_cpus() -> None:
    qat = model(256, 512)
    quantize_(qat, QATConfig(BASE))
    formats = qat[0].prepared.recipe.fprop_weight, qat[0].prepared.recipe.fprop_input
    for fmt, t in zip(
        formats, (qat[0].weight.detach(), torch.randn(64, 512, dtype=torch.bfloat16).cuda()), strict=True
    ):
        here, there = fmt.encode(t.cpu()), fmt.encode(t)
        assert torch.equal(here.codes.view(torch.uint8), there.codes.cpu().view(torch.uint8))
        assert torch.equal(here.scale, there.scale.cpu())


@pytest.mark.xdist_group("256x384")
def test_rows_of_zeros_give_the_bias() -> None:
    """torchao's activations are 0 / 0 there."""
    qat = model(256, 384)
    quantize_(qat, QATConfig(BASE))
    y = qat(torch.zeros(3, 384, dtype=torch.bfloat16, device="cuda"))
    assert torch.equal(y, qat[0].bias.expand(3, -1))


@pytest.mark.xdist_group("512x1024")
def test_gradients_point_where_nn_linears_do() -> None:
    plain = model(512, 1024)
    qat = copy.deepcopy(plain)
    quantize_(qat, QATConfig(BASE))
    x = torch.randn(64, 1024, dtype=torch.bfloat16, device="cuda")
    g = torch.randn(64, 512, dtype=torch.bfloat16, device="cuda")
    for m in (plain, qat):
        m(x).backward(g)
    for got, want in zip(qat.parameters(), plain.parameters(), strict=True):
        assert torch.cosine_similarity(got.grad.double().flatten(), want.grad.double().flatten(), 0) >= 0.99
