"""On a Hopper GPU with mslk-cuda: the prepared layer is torchao's own converted layer, whatever the layout and M.

The converted layer is made by torchao's `quantize_` and calls torchao's kernels; no code of ours is in it.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchao.quantization import (
    Float8DynamicActivationFloat8WeightConfig,
    Float8DynamicActivationInt4WeightConfig,
    Int4WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    PerRow,
    PerTensor,
)
from torchao.quantization import quantize_ as torchao_quantize_
from torchao.quantization.quantize_.common import KernelPreference

from aoquant import QATConfig, backend, quantize_
from aoquant.ops.gemm import mslk
from aoquant.report.measure import sqnr

pytestmark = pytest.mark.gpu

TORCH = KernelPreference.TORCH
CONFIGS: dict[str, Any] = {
    "plain": Int4WeightOnlyConfig(),
    "preshuffled": Int4WeightOnlyConfig(int4_packing_format="preshuffled"),
    "tile packed": Int4WeightOnlyConfig(int4_packing_format="tile_packed_to_4d"),
    "tile packed hqq": Int4WeightOnlyConfig(
        64, int4_packing_format="tile_packed_to_4d", int4_choose_qparams_algorithm="hqq"
    ),
    "fp8 preshuffled": Float8DynamicActivationInt4WeightConfig(),
    "fp8 plain": Float8DynamicActivationInt4WeightConfig(int4_packing_format="plain"),
    "fp8 mslk": Float8DynamicActivationFloat8WeightConfig(
        granularity=PerRow(), kernel_preference=KernelPreference.MSLK
    ),
    "fp8 row": Float8DynamicActivationFloat8WeightConfig(granularity=PerRow(), kernel_preference=TORCH),
    "fp8 tensor": Float8DynamicActivationFloat8WeightConfig(granularity=PerTensor(), kernel_preference=TORCH),
    "int8": Int8DynamicActivationInt8WeightConfig(),
}
SHAPES = ((64, 1024), (512, 14336), (2048, 1024), (4096, 4096), (14336, 4096), (4096, 14336))  # N, K


@pytest.mark.parametrize(("n", "k"), SHAPES, ids=lambda v: str(v))
@pytest.mark.parametrize("name", CONFIGS)
def test_prepared_equals_torchaos_layer(name: str, n: int, k: int) -> None:
    if ("plain" in name or "shuffled" in name or "mslk" in name) and (
        reason := mslk.why_not_operator("bf16i4bf16_rowwise")
    ) is not None:
        pytest.skip(reason)
    model = nn.Sequential(nn.Linear(k, n, dtype=torch.bfloat16, device="cuda"))
    theirs = copy.deepcopy(model)
    torchao_quantize_(theirs, CONFIGS[name])
    quantize_(model, QATConfig(CONFIGS[name]))
    converted = copy.deepcopy(model)
    quantize_(converted, QATConfig(step="convert"))
    with torch.no_grad():
        for shape in ((k,), (1, k), (16, k), (3, 5, k), (64, k), (128, k), (512, k), (2048, k), (0, k)):
            if name == "int8" and shape in ((k,), (0, k)):
                continue  # torchao's layer takes neither
            x = torch.randn(shape, device="cuda").bfloat16()
            y = model(x)
            assert y.isfinite().all()
            if not x.numel():
                continue
            want = output(name, theirs, x)
            if want is None:  # nothing to be equal to: the exact products, summed by the kernel with one scale
                with backend("reference"):
                    assert sqnr(model(x), y) > 45, shape
                continue
            assert torch.equal(y, want), shape
            assert torch.equal(y, converted(x)), shape


def output(name: str, theirs: nn.Module, x: Tensor) -> Tensor | None:
    """theirs(x); None where cuBLAS in torch 2.11 has no kernel with a scale per row, and torchao's layer raises."""
    try:
        y: Tensor = theirs(x)
    except RuntimeError as error:
        if name == "fp8 row" and "NOT_SUPPORTED" in str(error):
            return None
        raise
    return y
