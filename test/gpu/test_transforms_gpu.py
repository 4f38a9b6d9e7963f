"""Transforms on a GPU: fused kernels against the reference, its CUDA bytes against the CPU's, layers that convert."""

from __future__ import annotations

import copy

import pytest
import torch
from support.bits import compare, differing
from support.gemm import with_values
from support.gpu import no_waiting
from support.kernel_inputs import BF16, CUDA, F16, F32, inputs
from support.transform_cases import MASKS, SIZES
from torch import nn

from aoquant import (
    WUSH,
    Hadamard,
    MXFP4WeightConfig,
    NVFP4WeightConfig,
    QATConfig,
    backend,
    calibrate,
    get_format,
    ops,
    quantize_,
)
from aoquant.formats import get_operand
from aoquant.ops import codec

pytestmark = pytest.mark.gpu

FUSED = ("nvfp4", "mxfp4")
UNFUSED = ("mxfp8", "int4-g128", "fp8-row", "high-precision", "fouroversix", "nvfp4-static:0.001")


def names(size: int, inner: str) -> list[str]:
    """With and without signs; the weight side of those that have one."""
    side = "-inverse" if size in (32, 128) else ""
    return [f"hadamard{size}+{inner}", f"hadamard{size}-s{MASKS[size]:x}{side}+{inner}"]


KINDS = ("every", "exponents", "large", "minus-zeros")
# not every combination: each kernel takes seconds to compile
ENCODED = [(size, inner, BF16) for size in SIZES for inner in FUSED] + [
    (size, inner, dtype) for size, inner in ((16, "nvfp4"), (32, "mxfp4")) for dtype in (F16, F32)
]
ENCODED += [*((size, "nvfp4-row", BF16) for size in SIZES), (16, "nvfp4-row", F32)]
ENCODED += [(32, "mxfp4-quest", BF16), (128, "mxfp4-quest", F32), (16, "qutlass-mxfp4", BF16)]
ONE_PASS = [
    (16, "nvfp4", True),
    (16, "nvfp4-row", True),
    (32, "mxfp4", True),
    (128, "nvfp4", False),
    (32, "mxfp4-quest", True),
]


def data(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Some of `inputs`, on the CPU; sixteen rows at least and always, so that a kernel is compiled once."""
    made = inputs(dtype)
    return {kind: made[kind].repeat(6, 1)[: 16 * (len(made[kind]) // 16 or 1)] for kind in KINDS}


@pytest.mark.parametrize(("size", "inner", "dtype"), ENCODED, ids=str)
def test_fused_encoding_equals_the_reference(size: int, inner: str, dtype: torch.dtype) -> None:
    fmt = get_format(names(size, inner)[1])
    for kind, x_cpu in data(dtype).items():
        x = x_cpu.to(CUDA)
        want = fmt.encode(x)
        compare(want, fmt.encode(x_cpu), f"{kind}, reference on CUDA against CPU")
        with backend("triton"):
            compare(codec.encode(fmt, x), want, kind)


@pytest.mark.parametrize(("size", "inner", "operand"), ONE_PASS, ids=str)
def test_codes_and_values_in_one_pass(size: int, inner: str, operand: bool) -> None:
    fmt = get_format(names(size, inner)[0])
    for kind, x_cpu in data(BF16).items():
        x = x_cpu.to(CUDA)
        want = fmt.encode(x)
        values = fmt.operand(want, BF16) if operand else fmt.decode(want, BF16)
        with backend("triton"):
            for keep in (True, False):
                e, got, alpha = with_values(fmt, x, BF16, operand=operand, keep=keep)
                assert (e is None) == (not keep)
                if e is not None:
                    compare(e, want, kind)
                assert differing(got, values) == 0, kind
                assert differing(alpha, fmt.alpha(want)) == 0, kind


@pytest.mark.parametrize("size", [16, 128], ids=str)
@pytest.mark.parametrize("inner", UNFUSED)
def test_other_formats_behind_a_transform(inner: str, size: int) -> None:
    fmt = get_format(names(size, inner)[1])
    for kind in ("large", "minus-zeros"):
        x_cpu = data(BF16)[kind]
        want = fmt.encode(x_cpu.to(CUDA))
        compare(want, fmt.encode(x_cpu), f"{kind}, CUDA against CPU")
        compare(codec.encode(fmt, x_cpu.to(CUDA)), want, kind)


@pytest.mark.parametrize(("size", "dtype"), [*((s, BF16) for s in SIZES), (16, F32)], ids=str)
def test_pulled_back_gradients(size: int, dtype: torch.dtype) -> None:
    name = names(size, "nvfp4")[1]
    fmt = get_operand(name)
    for kind, g_cpu in data(dtype).items():
        g = g_cpu.to(CUDA)
        with backend("triton"):
            got = ops.pull_back(g, fmt)
            there = codec.transform(fmt, g, None)
        assert differing(got, fmt.pull_back(g)) == 0, kind
        assert differing(there, fmt.transformed(g)) == 0, kind
        assert differing(got, fmt.pull_back(g_cpu)) == 0, kind


@pytest.mark.parametrize("name", ["mxfp4-quest", *names(32, "mxfp4-quest"), names(128, "xx-mxfp4")[1]])
def test_what_is_clipped_gets_no_gradient(name: str) -> None:
    clipped, operand = 0, get_operand(name)
    for kind, x_cpu in data(BF16).items():
        x, g = x_cpu.to(CUDA), torch.randn(x_cpu.shape, generator=torch.Generator().manual_seed(3)).to(CUDA, BF16)
        with backend("reference"):
            want = ops.saturated(x, operand)
            pulled = ops.pull_back(g, operand, None, want)
        assert torch.equal(want.cpu(), ops.saturated(x_cpu, operand)), f"{kind}, CUDA against CPU"
        with backend("triton"):
            assert torch.equal(ops.saturated(x, operand), want), kind
            assert differing(ops.pull_back(g, operand, None, want), pulled) == 0, kind
        clipped += int(want.count_nonzero())
    assert "quest" not in name or clipped


@pytest.mark.parametrize(
    "config",
    [
        NVFP4WeightConfig(transform=Hadamard(16)),
        MXFP4WeightConfig(transform=Hadamard(128, MASKS[128])),
        NVFP4WeightConfig(activation=None, transform=Hadamard(32)),
        NVFP4WeightConfig(transform=WUSH(16)),
        MXFP4WeightConfig(transform=WUSH(64)),
    ],
    ids=["nvfp4-h16", "mxfp4-h128", "nvfp4-weight-h32", "nvfp4-wush", "mxfp4-wush"],
)
def test_layers(config: NVFP4WeightConfig) -> None:
    """Prepared == converted at every M; gradients on the GPU and on the CPU agree; no host sync in a step."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(768, 512, dtype=BF16))
    quantize_(net, QATConfig(config))
    if config.transform is not None and config.transform.fitted:
        calibrate(net, [torch.randn(256, 768, dtype=BF16)])
    gpu = copy.deepcopy(net).to(CUDA)
    x, g = torch.randn(96, 768, dtype=BF16), torch.randn(96, 512, dtype=BF16)
    grads = []
    for model in (net, gpu):
        device = model[0].weight.device
        leaf, dy = x.to(device, copy=True).requires_grad_(), g.to(device)
        y = model(leaf)
        torch.cuda.synchronize()
        with no_waiting():
            y.backward(dy)
            model(leaf.detach())
        grads.append([leaf.grad.float().cpu(), model[0].weight.grad.float().cpu()])
    for a, b in zip(*grads, strict=True):
        assert (a - b).norm() < 0.01 * a.norm()
    packed = copy.deepcopy(gpu)
    quantize_(packed, QATConfig(step="convert"))
    with torch.no_grad():
        for rows in (1, 4, 64, 1024):
            x = torch.randn(rows, 768, dtype=BF16, device=CUDA)
            assert torch.equal(gpu(x), packed(x)), rows
