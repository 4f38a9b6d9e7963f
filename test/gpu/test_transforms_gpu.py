"""Transforms on the device: the fused kernels against the reference, the reference on CUDA against the CPU, and layers that train and convert."""

from __future__ import annotations

import copy

import pytest
import torch
from test_triton_exact import ALL, BF16, CUDA, F32, compare, differing, inputs
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
from aoquant.formats import Transformed
from aoquant.ops import CodecRequest, codec

pytestmark = pytest.mark.gpu

SIZES = (16, 32, 64, 128)
MASKS = {16: 0xA5C3, 32: 0x9E3779B9, 64: 0x9E3779B97F4A7C15, 128: (1 << 127) | 0xBEEF}
FUSED = ("nvfp4", "mxfp4")
UNFUSED = ("mxfp8", "int4-g128", "fp8-row", "high-precision", "fouroversix", "nvfp4-static:0.001")
sizes = pytest.mark.parametrize("size", SIZES, ids=[f"G{s}" for s in SIZES])


def names(size: int, inner: str) -> list[str]:
    """With and without signs; the weight side of those that have one."""
    side = "-inverse" if size in (32, 128) else ""
    return [f"hadamard{size}+{inner}", f"hadamard{size}-s{MASKS[size]:x}{side}+{inner}"]


KINDS = ("every", "exponents", "large", "minus-zeros", "zeros")


@sizes
@pytest.mark.parametrize("inner", FUSED)
@pytest.mark.parametrize("dtype", ALL, ids=lambda d: str(d).removeprefix("torch."))
def test_fused_encoding_equals_the_reference(inner: str, dtype: torch.dtype, size: int) -> None:
    for name in names(size, inner)[dtype != BF16 :]:
        fmt = get_format(name)
        made = inputs(dtype)
        for kind in KINDS:
            x, what = made[kind].to(CUDA), f"{name} {kind}"
            want = fmt.encode(x)
            compare(want, fmt.encode(made[kind].contiguous()), f"{what}, reference on CUDA against CPU")
            with backend("triton"):
                compare(codec.encode(fmt, x), want, what)


@sizes
@pytest.mark.parametrize("inner", FUSED)
@pytest.mark.parametrize("operand", [True, False], ids=["operand", "values"])
def test_codes_and_values_in_one_pass(inner: str, operand: bool, size: int) -> None:
    fmt = get_format(names(size, inner)[1])
    made = inputs(BF16)
    for kind in KINDS:
        x = made[kind].to(CUDA)
        want = fmt.encode(x)
        values = fmt.operand(want, BF16) if operand else fmt.decode(want, BF16)
        with backend("triton"):
            for keep in (True, False):
                e, got, alpha = codec.quantize(fmt, x, BF16, operand=operand, keep=keep)
                assert (e is None) == (not keep)
                if e is not None:
                    compare(e, want, kind)
                assert differing(got, values) == 0, kind
                assert differing(alpha, fmt.alpha(want)) == 0, kind


@sizes
@pytest.mark.parametrize("inner", UNFUSED)
def test_other_formats_behind_a_transform(inner: str, size: int) -> None:
    fmt = get_format(names(size, inner)[1])
    for kind in ("large", "every-finite", "minus-zeros"):
        x_cpu = inputs(BF16)[kind]
        want = fmt.encode(x_cpu.to(CUDA))
        compare(want, fmt.encode(x_cpu.contiguous()), f"{kind}, CUDA against CPU")
        compare(codec.encode(fmt, x_cpu.to(CUDA)), want, kind)


@sizes
@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
def test_pulled_back_gradients(size: int, dtype: torch.dtype) -> None:
    for name in names(size, "nvfp4"):
        fmt = get_format(name)
        assert isinstance(fmt, Transformed)
        for kind in ("large", "every", "minus-zeros"):
            g = inputs(dtype)[kind].to(CUDA)
            with backend("triton"):
                got = ops.pull_back(g, name)
            assert differing(got, fmt.pull_back(g)) == 0, kind
            assert differing(got, fmt.pull_back(g.cpu())) == 0, kind


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
        leaf = x.to(model[0].weight.device).requires_grad_()
        y = model(leaf)
        torch.cuda.synchronize()
        if leaf.is_cuda:
            torch.cuda.set_sync_debug_mode("error")
        try:
            y.backward(g.to(y.device))
            model(leaf.detach())
        finally:
            torch.cuda.set_sync_debug_mode("default")
        grads.append([leaf.grad.float().cpu(), model[0].weight.grad.float().cpu()])
    for a, b in zip(*grads, strict=True):
        assert (a - b).norm() < 0.01 * a.norm()
    packed = copy.deepcopy(gpu)
    quantize_(packed, QATConfig(step="convert"))
    with torch.no_grad():
        for rows in (1, 4, 64, 1024):
            x = torch.randn(rows, 768, dtype=BF16, device=CUDA)
            assert torch.equal(gpu(x), packed(x)), rows


def test_the_router_says_what_is_fused() -> None:
    for name, backend_name in (
        ("hadamard16+nvfp4", "triton"),
        ("hadamard16+high-precision", "triton"),
        ("wush16+high-precision", "reference"),
    ):
        request = CodecRequest("encode", get_format(name), CUDA, BF16, 64, 768)
        assert dict(ops.explain(request))[backend_name] == "runs"
