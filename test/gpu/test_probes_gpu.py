"""The operand that each int4 kernel feeds its tensor core, read out with an identity: kernel(eye) == Format.operand.

A sum with one product that is not zero has no order, so the comparison is exact. A compiler's choice of a fused
multiply-add is part of what is read, so this is to be run again for every release of MSLK. Zeros' signs do not show:
+0.0 + -0.0 is +0.0.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.golden_inputs import golden_input, weights
from torch import Tensor

from aoquant import get_format
from aoquant.formats import Encoded, Format
from aoquant.ops.gemm import mslk, torch_int4

pytestmark = pytest.mark.gpu

BF16, F32, E4M3, CUDA = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.device("cuda")


def operator(name: str) -> Any:
    if (reason := mslk.why_not_operator(name)) is not None:
        pytest.skip(reason)
    return mslk.operator(name)


def packed(e: Encoded) -> tuple[Tensor, Tensor, Tensor]:
    """Codes (N, K/2) int8, scale and zero (G, N), as MSLK takes them."""
    assert e.scale is not None
    scale = e.scale.t().contiguous()
    zero = torch.zeros_like(scale) if e.zero is None else e.zero.t().contiguous()
    return e.codes.view(torch.int8), scale, zero


def shuffled(e: Encoded) -> tuple[Tensor, Tensor, Tensor]:
    codes, scale, zero = packed(e)
    return (*operator("preshuffle_i4")(codes.clone(), scale.clone()), zero)


def stacked(parts: list[tuple[Tensor, ...]]) -> list[Tensor]:
    """Codes (B, N, K/2); scales and zeros (B G, N), since of (B, G, N) the kernel takes B / B = 1 for G."""
    codes, scale, zero = ([p[i] for p in parts] for i in range(3))
    return [torch.stack(codes), torch.cat(scale), torch.cat(zero)]


def inputs(dtype: torch.dtype) -> list[Tensor]:
    return [golden_input("int4-", dtype).to(CUDA), weights(512, 512, dtype, 21).to(CUDA)]


def assert_operand(y_KN: Tensor, fmt: Format, e: Encoded) -> None:
    want = fmt.operand(e, BF16)
    assert int((y_KN.t() != want).sum()) == 0, f"{fmt.name}: {int((y_KN.t() != want).sum())} of {want.numel()}"


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16 scales", "f32 scales"])
@pytest.mark.parametrize("group", [64, 128])
def test_bf16i4bf16_rowwise(group: int, dtype: torch.dtype) -> None:
    fmt, run = get_format(f"int4-g{group}"), operator("bf16i4bf16_rowwise")
    for x in inputs(dtype):
        e = fmt.encode(x)
        assert_operand(run(torch.eye(e.k, dtype=BF16, device=CUDA), *packed(e)), fmt, e)


@pytest.mark.parametrize("group", [64, 128])
def test_bf16i4bf16_shuffled(group: int) -> None:
    fmt, run = get_format(f"int4-bf16-g{group}"), operator("bf16i4bf16_shuffled")
    for x in inputs(F32):
        e = fmt.encode(x)
        assert_operand(run(torch.eye(e.k, dtype=BF16, device=CUDA), *shuffled(e)), fmt, e)


@pytest.mark.parametrize("layout", ["rowwise", "shuffled"])
def test_batched_kernels_are_the_others_one_by_one(layout: str) -> None:
    """torchao calls them for stacks of experts; no layer here does. Operands and sums are the 2-D kernels'."""
    fmt = get_format("int4-bf16-g128")
    one, many = operator(f"bf16i4bf16_{layout}"), operator(f"bf16i4bf16_{layout}_batched")
    encoded = [fmt.encode(weights(256, 512, BF16, seed).to(CUDA)) for seed in (31, 32, 33)]
    parts = [(packed if layout == "rowwise" else shuffled)(e) for e in encoded]
    eye = torch.eye(512, dtype=BF16, device=CUDA).expand(3, -1, -1).contiguous()
    for e, y in zip(encoded, many(eye, *stacked(parts)), strict=True):
        assert_operand(y, fmt, e)
    x = torch.randn(3, 192, 512, dtype=BF16, device=CUDA)
    for x_MK, part, y in zip(x, parts, many(x, *stacked(parts)), strict=True):
        assert torch.equal(one(x_MK, *part), y)


def test_f8i4bf16_rowwise() -> None:
    fmt, run = get_format("int4-e4m3-g128"), operator("f8i4bf16_rowwise")
    for x in inputs(BF16):
        codes, scale, zero = packed(e := fmt.encode(x * 64))
        eye, ones = torch.eye(e.k, device=CUDA).to(E4M3), torch.ones(e.k, device=CUDA)
        assert_operand(run(eye, codes, ones, scale, zero), fmt, e)


def test_f8i4bf16_shuffled() -> None:
    fmt, run = get_format("int4-e4m3-row-g128"), operator("f8i4bf16_shuffled")
    for x in inputs(BF16):
        codes, scale, _ = shuffled(e := fmt.encode(x))
        eye, ones = torch.eye(e.k, device=CUDA).to(E4M3), torch.ones(e.k, device=CUDA)
        rows = torch.ones(codes.shape[0], device=CUDA)
        assert_operand(run(eye, codes, ones, rows, scale), fmt, e)


@pytest.mark.parametrize("group", [32, 64, 128, 256])
def test_tinygemm(group: int) -> None:
    fmt: Any = get_format(f"int4-tinygemm-g{group}")
    for x in inputs(BF16):
        e = fmt.encode(x)
        eye = torch.eye(torch_int4.CUDA_K, dtype=BF16, device=CUDA)[: e.k]
        codes, scales = torch_int4.pack_cuda(fmt, e)
        y = torch.ops.aten._weight_int4pack_mm(eye, codes, group, scales)
        assert_operand(y[:, : e.codes.shape[0]], fmt, e)


def test_groups_of_32_are_what_the_adapter_refuses() -> None:
    """The kernel raises nothing and returns wrong numbers. If this fails, MSLK mended it: drop the refusal."""
    fmt, run = get_format("int4-g32"), operator("bf16i4bf16_rowwise")
    e = fmt.encode(weights(512, 512, BF16, 21).to(CUDA))
    y = run(torch.eye(512, dtype=BF16, device=CUDA), *packed(e))
    assert int((y.t() != fmt.operand(e, BF16)).sum()) > 10_000
