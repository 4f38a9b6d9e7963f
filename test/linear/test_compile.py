"""torch.compile changes nothing: prepared and converted, eager and compiled, are four equal outputs, and so are their
gradients.

Everything that rounds is an opaque op, so a few cases stand for all; the rest of the matrix is eager. Whole graphs
only.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.linear_cases import (
    BF16,
    BY_NAME,
    F32,
    Case,
    assert_equal,
    autocast,
    converted,
    data,
    dtype_name,
    layer,
    prepared,
)
from support.training_cases import assert_same, step
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from aoquant import QATConfig, quantize_

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

ALWAYS = ("nvfp4-act", "int4-g32", "fp8-row-act")
SLOW = ("mxfp4-act", "int8-row-asymact", "intx4-int8act", "nvfp4-dynamic", "fp8-tensor-act", "mxfp8-act")


def names(always: tuple[str, ...], slow: tuple[str, ...] = ()) -> Any:
    params = [*always, *(pytest.param(n, marks=pytest.mark.slow) for n in slow)]
    return pytest.mark.parametrize("name", params)


def whole(module: nn.Module, **options: Any) -> Any:
    return torch.compile(module, fullgraph=True, **options)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=dtype_name)
@names(ALWAYS, SLOW)
def test_four_equal_outputs_and_gradients(name: str, dtype: torch.dtype) -> None:
    case = replace(BY_NAME[name], n=48)  # wide and many enough for inductor to vectorise its sums
    qat = prepared(case, layer(case, dtype))
    packed = converted(case, qat)
    x, g = data("mixed", 70, case.k, dtype, 1), data("normal", 70, case.n, dtype, 2)
    eager = step(qat, x, g)
    compiled = step(qat, x, g, whole(qat))
    assert_same(compiled, eager)
    eager_packed, compiled_packed = (step(packed, x, g, run) for run in (packed, whole(packed)))
    for part in ("y", "x", "bias"):
        assert_equal(eager_packed[part], eager[part], f"converted, {part}")
        assert_equal(compiled_packed[part], eager[part], f"converted and compiled, {part}")


@names(("ao.int8act-intx4-g32", "ao.fp8act-fp8-row"), ("ao.int8act-int8-row", "ao.mxfp8-rceil", "ao.intx4-g32"))
def test_compiled_prepared_equals_torchao_eager(name: str) -> None:
    """torchao's tensors stay eager: compiled, inductor keeps float32 between their operations."""
    case = BY_NAME[name]
    qat = prepared(case, layer(case, BF16))
    x = data("outlier" if name.startswith("ao.fp8") else "mixed", 6, case.k, BF16, 1)
    assert_equal(whole(qat)(x), converted(case, qat)(x))


class Block(nn.Module):
    """Two layers and what lies between them, so that inductor has something to fuse with."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = layer(case, dtype, n=2 * case.k)
        self.down = layer(case, dtype, n=case.k, k=2 * case.k)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x * 0.5)) + 1)


@names(("nvfp4-act",), ("int4-g32", "fp8-row-act", "mxfp4-act"))
def test_block_compiled_prepared_equals_compiled_converted(name: str) -> None:
    """Neighbours may fuse and keep float32; both sides see the same, because the ops are opaque."""
    case = BY_NAME[name]
    block = Block(case, BF16)
    quantize_(block, QATConfig(case.config))
    x = data("normal", 6, case.k, BF16, 1)
    want = whole(block)(x)
    quantize_(block, QATConfig(case.config, step="convert"))
    torch._dynamo.reset()
    assert_equal(whole(block)(x), want)


@names(("nvfp4-act",), ("int4-g32", "fp8-row-act"))
def test_batch_sizes_share_one_graph(name: str) -> None:
    """One dynamic graph for all batches, forward and backward; each equals eager."""
    case = BY_NAME[name]
    qat = prepared(case, layer(case, BF16))
    counter = CompileCounterWithBackend("inductor")
    run = torch.compile(qat, fullgraph=True, dynamic=True, backend=counter)
    for rows in (6, 3, 17):
        x, g = data("normal", rows, case.k, BF16, rows), data("normal", rows, case.n, BF16, rows + 1)
        assert_same(step(qat, x, g, run), step(qat, x, g))
    assert counter.frame_count == 1


@names(("fp8-row-act",), ("int4-g32", "nvfp4-act", "int8-row-asymact"))
def test_under_autocast(name: str) -> None:
    """Autocast around the compiled call: four equal outputs and gradients from a float32 layer."""
    case = BY_NAME[name]
    qat = prepared(case, layer(case, F32))
    packed = converted(case, qat)
    x, g = data("normal", 6, case.k, F32, 1), data("normal", 6, case.n, BF16, 2)
    with autocast(BF16):
        eager, eager_packed = step(qat, x, g), packed(x)
        compiled, compiled_packed = step(qat, x, g, whole(qat)), whole(packed)(x)
    assert eager["y"].dtype == BF16 and eager["weight"].dtype == F32
    assert_same(compiled, eager)
    assert_equal(eager_packed, eager["y"])
    assert_equal(compiled_packed, eager["y"])
