"""What torchao's QAT gets wrong, silently or loudly, held against ours: one test a bug, beside torchao's behaviour
where that is cheap.

Elsewhere: float8 that does not train (linear/test_training.py), zero rows and tensors, inputs of any shape and stride
(linear/test_prepared_converted.py), empty batches (test_no_rows.py), an activation config alone
(linear/test_fake_quantize_configs.py), conversions with another config or without prepare, hooks, attributes, mode and
subclasses (model/test_api.py), tied embeddings (model/test_sharing.py), compiled layers (linear/test_compile.py).
"""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchao.prototype.mx_formats import MXDynamicActivationMXWeightConfig, NVFP4DynamicActivationNVFP4WeightConfig
from torchao.quantization import (
    Float8DynamicActivationFloat8WeightConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8DynamicActivationIntxWeightConfig,
    IntxWeightOnlyConfig,
    PerGroup,
    PerRow,
)
from torchao.quantization import quantize_ as torchao_quantize_
from torchao.quantization.qat import QATConfig as TorchaoQATConfig
from torchao.quantization.quantize_.common import KernelPreference

from aoquant import QATConfig, quantize_

MX = MXDynamicActivationMXWeightConfig(kernel_preference=KernelPreference.EMULATED)
NVFP4 = NVFP4DynamicActivationNVFP4WeightConfig(use_triton_kernel=False)
FP8 = Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())
BASES: dict[str, Any] = {
    **{name: name for name in ("int4-g32", "int4-g32/fp8-row", "intx4-g32/intx8-row-asym", "int8-row/int8-row")},
    **{name: name for name in ("fp8", "fp8-block", "mxfp4", "mxfp8", "nvfp4")},
    "torchao-mx": MX,
    "torchao-nvfp4": NVFP4,
    "torchao-fp8": FP8,
    "torchao-intx": Int8DynamicActivationIntxWeightConfig(torch.int4, PerGroup(32)),
}
every_base = pytest.mark.parametrize("base", BASES.values(), ids=BASES)


def model(n: int = 32, k: int = 128) -> nn.Sequential:
    return nn.Sequential(nn.Linear(k, n, dtype=torch.bfloat16))


def inputs(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16)


@every_base
def test_no_gradient_flows_through_a_scale(base: Any) -> None:
    """Doubling one row's largest weight's gradient path through absmax would show in every other weight of its
    block.
    """
    qat = model()
    quantize_(qat, QATConfig(base))
    x, g = inputs(8, 128).requires_grad_(), torch.zeros(8, 32, dtype=torch.bfloat16)
    g[0, 3] = 1  # one output: every weight of the other rows has gradient 0, and dx is that row
    qat(x).backward(g)
    assert (qat[0].weight.grad[torch.arange(32) != 3] == 0).all()
    assert (x.grad[1:] == 0).all() and x.grad[0].isfinite().all()


@every_base
def test_bias_has_a_gradient(base: Any) -> None:
    """torchao's MX and NVFP4 layers return none, and a bias that never moves looks like one that is done."""
    qat, g = model(), inputs(8, 32)
    quantize_(qat, QATConfig(base))
    qat(inputs(8, 128)).backward(g)
    assert torch.equal(qat[0].bias.grad, g.float().sum(0).bfloat16())


@every_base
def test_padding_tokens_and_pruned_weights_stay_finite(base: Any) -> None:
    """Rows of zeros, then nothing but zeros, in x and in W."""
    qat = model()
    with torch.no_grad():
        qat[0].weight[:5] = 0
    quantize_(qat, QATConfig(base))
    for x in (inputs(6, 128).index_fill(0, torch.tensor([0, 4]), 0), torch.zeros(6, 128, dtype=torch.bfloat16)):
        y = qat(x)
        y.float().square().sum().backward()
        assert y.isfinite().all() and qat[0].weight.grad.isfinite().all()
        assert torch.equal(y[0], qat[0].bias)
    with torch.no_grad():
        qat[0].weight.zero_()
    assert torch.equal(qat(inputs(3, 128)), qat[0].bias.expand(3, -1))


SHAPES: dict[str, tuple[Any, tuple[int, int]]] = {
    "intx": (IntxWeightOnlyConfig(torch.int4, PerGroup(48)), (32, 128)),
    "fp8": (FP8, (40, 128)),
    "nvfp4": (NVFP4, (40, 128)),
    "mx": (MX, (32, 80)),
    "fp8-block": ("fp8-block", (32, 192)),
    "int8": (Int8DynamicActivationInt8WeightConfig(), (32, 1)),
}


@pytest.mark.parametrize(("base", "shape"), SHAPES.values(), ids=SHAPES)
def test_shapes_that_do_not_fit_are_errors_at_prepare(base: Any, shape: tuple[int, int]) -> None:
    """torchao quantises some of these in QAT and skips them in PTQ, or the other way round, and says nothing."""
    with pytest.raises(ValueError, match=re.escape(f"0 {shape}")):
        quantize_(model(*shape), QATConfig(base))


def test_the_largest_weight_of_a_group_moves() -> None:
    """torchao's straight-through zeroes the gradient where the code is clipped: a symmetric group's largest positive
    weight, always.
    """
    base = IntxWeightOnlyConfig(torch.int4, PerGroup(32))
    ours = model()
    with torch.no_grad():
        ours[0].weight.view(32, 4, 32)[..., 7] = 7.5  # the scale is 1, and 7.5 rounds to 8: there is no such code
    theirs = copy.deepcopy(ours)
    quantize_(ours, QATConfig(base))
    torchao_quantize_(theirs, TorchaoQATConfig(base))
    x, g = inputs(8, 128), inputs(8, 32)
    for m in (ours, theirs):
        m(x).backward(g)
    largest = torch.arange(7, 128, 32)
    assert (ours[0].weight.grad[:, largest] != 0).all()
    assert (theirs[0].weight.grad[:, largest] == 0).all()
