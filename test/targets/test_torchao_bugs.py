"""What torchao's QAT gets wrong, silently or loudly, held against ours: one test a bug, beside torchao's behaviour
where that is cheap.

Elsewhere: float8 that does not train (layers/test_training.py), zero rows and tensors
(layers/test_prepared_converted.py), an activation config alone (layers/test_fake_quantize_configs.py), conversions with
another config or without prepare, hooks, attributes, mode, subclasses and tied embeddings (model/test_api.py), compiled
layers (layers/test_compile.py).
"""

from __future__ import annotations

import copy
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

from aoquant import (
    FP8WeightConfig,
    Int4WeightConfig,
    Int8WeightConfig,
    IntxWeightConfig,
    MXFP4WeightConfig,
    MXFP8WeightConfig,
    NVFP4WeightConfig,
    QATConfig,
    quantize_,
)

MX = MXDynamicActivationMXWeightConfig(kernel_preference=KernelPreference.EMULATED)
NVFP4 = NVFP4DynamicActivationNVFP4WeightConfig(use_triton_kernel=False)
FP8 = Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())
BASES: dict[str, Any] = {
    "int4": Int4WeightConfig(32),
    "int4-fp8": Int4WeightConfig(32, activation="fp8-row"),
    "intx": IntxWeightConfig(4, 32, activation="intx8-row-asym"),
    "int8": Int8WeightConfig(activation="int8-row"),
    "fp8": FP8WeightConfig(),
    "fp8-block": FP8WeightConfig(granularity="block"),
    "mxfp4": MXFP4WeightConfig(),
    "mxfp8": MXFP8WeightConfig(),
    "nvfp4": NVFP4WeightConfig(),
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


@pytest.mark.slow
def test_compiled_fp8_int4_has_no_nan_gradients() -> None:
    """torchao's: 18 % of its weight gradients, on a GPU."""
    qat = model()
    quantize_(qat, QATConfig(BASES["int4-fp8"]))
    x = inputs(8, 128)
    qat(x).float().square().mean().backward()
    eager, qat[0].weight.grad = qat[0].weight.grad, None
    torch.compile(qat, backend="aot_eager", fullgraph=True)(x).float().square().mean().backward()
    assert torch.equal(qat[0].weight.grad, eager) and eager.isfinite().all()
    torch._dynamo.reset()


@every_base
def test_bias_has_a_gradient(base: Any) -> None:
    """torchao's MX and NVFP4 layers return none, and a bias that never moves looks like one that is done."""
    qat, g = model(), inputs(8, 32)
    quantize_(qat, QATConfig(base))
    qat(inputs(8, 128)).backward(g)
    assert torch.equal(qat[0].bias.grad, g.float().sum(0).bfloat16())


def test_torchaos_mx_bias_has_none() -> None:
    theirs = model()
    torchao_quantize_(theirs, TorchaoQATConfig(MX))
    theirs(inputs(8, 128)).float().sum().backward()
    assert theirs[0].bias.grad is None


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


@every_base
def test_empty_batches_and_any_number_of_dimensions(base: Any) -> None:
    """torchao crashes on empty batches; its NVFP4 takes two and three dimensions, its MX contiguous inputs alone."""
    qat = model()
    quantize_(qat, QATConfig(base))
    x = inputs(6, 128)
    y = qat(x)
    assert torch.equal(qat(x.view(1, 2, 3, 128)).view(6, 32), y)
    assert torch.equal(qat(x.t().contiguous().t()), y)
    empty = x[:0].requires_grad_()
    qat(empty).sum().backward()
    assert empty.grad.shape == (0, 128) and (qat[0].weight.grad == 0).all()


def test_torchaos_mx_refuses_what_ours_takes() -> None:
    theirs = model()
    torchao_quantize_(theirs, TorchaoQATConfig(MX))
    with pytest.raises(AssertionError):
        theirs(inputs(6, 128).t().contiguous().t())


@pytest.mark.parametrize(
    ("base", "shape", "message"),
    [
        (IntxWeightOnlyConfig(torch.int4, PerGroup(48)), (32, 128), r"0 \(32, 128\).*multiple of 48, got K = 128"),
        (FP8, (40, 128), r"0 \(40, 128\).*multiples of 16, got N = 40"),
        (NVFP4, (40, 128), r"0 \(40, 128\).*multiples of 16, got N = 40"),
        (MX, (32, 80), r"0 \(32, 80\).*multiple of 32, got K = 80"),
        (FP8WeightConfig(granularity="block"), (32, 192), r"0 \(32, 192\).*multiple of 128, got K = 192"),
        (Int8DynamicActivationInt8WeightConfig(), (32, 1), r"0 \(32, 1\).*_int_mm.* when K = 1"),
    ],
    ids=["intx", "fp8", "nvfp4", "mx", "fp8-block", "int8"],
)
def test_shapes_that_do_not_fit_are_errors_at_prepare(base: Any, shape: tuple[int, int], message: str) -> None:
    """torchao quantises some of these in QAT and skips them in PTQ, or the other way round, and says nothing."""
    with pytest.raises(ValueError, match=message):
        quantize_(model(*shape), QATConfig(base))


def test_torchao_skips_the_same_shape_silently() -> None:
    """Float8's convert leaves dimensions that are no multiple of 16 in bf16; its prepare had quantised them."""
    theirs = model(40)
    torchao_quantize_(theirs, TorchaoQATConfig(FP8))
    x = inputs(6, 128)
    prepared, plain = theirs(x), nn.functional.linear(x, theirs[0].weight, theirs[0].bias)
    assert not torch.equal(prepared, plain)


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


@every_base
def test_convert_with_another_base_is_an_error(base: Any) -> None:
    other = IntxWeightConfig(7, None)
    qat = model()
    quantize_(qat, QATConfig(base))
    with pytest.raises(ValueError, match=r"0 \(32, 128\): was prepared for .* and this config deploys"):
        quantize_(qat, QATConfig(other, step="convert"))
    quantize_(qat, QATConfig(base, step="convert"))
