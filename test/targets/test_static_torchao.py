"""torchao's static configs: prepared == converted == what torchao makes by itself from the same scale. Tolerance 0.

Int8Static and Float8Static keep their activation scale in the weight tensor, with as many dimensions as the input it
was calibrated on. torchao's NVFP4 runs over a kernel written from the specification, as in test_prepared_converted.py.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
from support.bits import same_bytes
from support.linear_cases import BF16, F32, assert_equal, cuda_division, data
from support.specified_kernels import fp4_scaled_mm
from torch import Tensor, nn
from torchao.prototype.mx_formats import NVFP4DynamicActivationNVFP4WeightConfig
from torchao.quantization import (
    Float8StaticActivationFloat8WeightConfig,
    Int8StaticActivationInt8WeightConfig,
    PerRow,
    PerTensor,
)
from torchao.quantization import quantize_ as torchao_quantize_
from torchao.quantization.qat import QATConfig as TorchaoQATConfig
from torchao.quantization.quant_primitives import MappingType

from aoquant import QATConfig, calibrate, quantize_

CONFIGS: dict[str, Any] = {
    "int8-tensor": Int8StaticActivationInt8WeightConfig(granularity=PerTensor()),
    "int8-row": Int8StaticActivationInt8WeightConfig(granularity=[PerTensor(), PerRow()]),
    "int8-row-asym": Int8StaticActivationInt8WeightConfig(
        granularity=[PerTensor(), PerRow()], act_mapping_type=MappingType.ASYMMETRIC
    ),
    "int8-reduced": Int8StaticActivationInt8WeightConfig(granularity=[PerTensor(), PerRow()], reduce_range=True),
    "fp8": Float8StaticActivationFloat8WeightConfig(),
    "fp8-step": Float8StaticActivationFloat8WeightConfig(step="prepare"),
}
EACH = pytest.mark.parametrize("name", CONFIGS)
BOTH = pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])


def model(dtype: torch.dtype, *, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 48, bias=bias, dtype=dtype), nn.ReLU(), nn.Linear(48, 32, dtype=dtype))


def batch(dtype: torch.dtype, *shape: int, seed: int = 3) -> Tensor:
    rows = torch.Size(shape).numel()
    return data("normal", rows, 64, dtype, seed).view(*shape, 64)


def linears(m: nn.Module) -> list[nn.Linear]:
    return [x for x in m.modules() if isinstance(x, nn.Linear)]


@BOTH
@EACH
@pytest.mark.parametrize("scales", ["dynamic", pytest.param("static", marks=pytest.mark.slow)])
def test_prepared_equals_the_converted_torchao_tensor(name: str, dtype: torch.dtype, scales: str) -> None:
    """After a step of training, on inputs in and beyond the calibrated range, 2-D and 3-D."""
    for bias, shape in ((True, (6,)), (False, (2, 3))):
        qat, x = model(dtype, bias=bias), batch(dtype, *shape)
        quantize_(qat, QATConfig(CONFIGS[name], scales=scales))
        calibrate(qat, [x])
        qat(x).float().square().mean().backward()
        torch.optim.SGD(qat.parameters(), 0.1).step()
        deployed = copy.deepcopy(qat)
        quantize_(deployed, QATConfig(CONFIGS[name], step="convert"))
        assert {type(m.weight.data).__name__ for m in linears(deployed)} <= {"Int8Tensor", "PrototypeFloat8Tensor"}
        for other in (x, x * 5, batch(dtype, *shape, seed=9)):
            assert_equal(qat(other), deployed(other), str(shape))


@BOTH
@pytest.mark.parametrize("name", ["int8-tensor", "int8-row", "int8-row-asym", "int8-reduced", "fp8"])
def test_a_given_scale_is_ptq_and_torchaos_own(name: str, dtype: torch.dtype) -> None:
    """act_quant_scale in the config: no calibration, and the bytes and outputs of torchao's quantize_."""
    x = batch(dtype, 6)
    given: dict[str, Any] = {"act_quant_scale": torch.tensor([[0.0213]])}
    if name.endswith("asym"):
        given["act_quant_zero_point"] = torch.tensor([[-7]], dtype=torch.int8)
    config = dataclasses.replace(CONFIGS[name], **given)
    ours, theirs, qat = (nn.Sequential(model(dtype)[0]) for _ in range(3))
    quantize_(ours, config)
    with cuda_division():
        torchao_quantize_(theirs, config)
    quantize_(qat, QATConfig(config))
    a, b = ours[0].weight.data, theirs[0].weight.data
    assert type(a) is type(b)
    for part in a.__tensor_flatten__()[0]:
        assert same_bytes(getattr(a, part), getattr(b, part)), part
    assert_equal(ours(x), theirs(x))
    assert_equal(qat(x), ours(x))
    quantize_(qat, QATConfig(config, step="convert"))
    assert_equal(qat(x), ours(x))


def test_fp8_calibration_is_torchaos_observer() -> None:
    """Observe with torchao, calibrate with us: the same scales, codes and outputs. bf16, where dividing is dividing
    everywhere.
    """
    batches = [batch(BF16, 2, 3, seed=s) for s in (3, 4, 5)]
    theirs, ours = model(BF16), model(BF16)
    torchao_quantize_(theirs, Float8StaticActivationFloat8WeightConfig(step="prepare"))
    for x in batches:
        theirs(x)
    torchao_quantize_(theirs, Float8StaticActivationFloat8WeightConfig(step="convert"))
    quantize_(ours, Float8StaticActivationFloat8WeightConfig(step="prepare"))
    calibrate(ours, batches)
    quantize_(ours, Float8StaticActivationFloat8WeightConfig(step="convert"))
    for a, b in zip(linears(ours), linears(theirs), strict=True):
        for part in a.weight.data.__tensor_flatten__()[0]:
            assert same_bytes(getattr(a.weight.data, part), getattr(b.weight.data, part)), part
    assert_equal(ours(batches[0]), theirs(batches[0]))


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
def test_nvfp4_step_prepare_calibrate_step_convert_is_torchaos(dtype: torch.dtype) -> None:
    """torchao's two steps around its own calibration loop and around ours: the same tensors; and prepared equals
    both.
    """

    def config(step: str) -> Any:
        return NVFP4DynamicActivationNVFP4WeightConfig(step=step, use_triton_kernel=False)

    batches = [batch(dtype, 2, 3, seed=s) for s in (3, 4)]
    theirs, ours = nn.Sequential(model(dtype)[0]), nn.Sequential(model(dtype)[0])
    with cuda_division(), mock.patch.object(torch, "_scaled_mm", fp4_scaled_mm):
        torchao_quantize_(theirs, config("prepare"))
        for x in batches:
            theirs(x)
        torchao_quantize_(theirs, config("convert"))
        quantize_(ours, config("prepare"))
        calibrate(ours, batches)
        want = [ours(x) for x in (*batches, batches[0] * 9, batches[0][0])]
        quantize_(ours, config("convert"))
        a, b = ours[0].weight.data, theirs[0].weight.data
        for part in a.__tensor_flatten__()[0]:
            assert same_bytes(getattr(a, part), getattr(b, part)), part
        assert a.act_per_tensor_scale.dim() == 0 and a.act_quant_kwargs == b.act_quant_kwargs
        for x, y in zip((*batches, batches[0] * 9, batches[0][0]), want, strict=True):
            assert_equal(ours(x), y)
            assert_equal(theirs(x), y)


def test_the_scale_has_the_dimensions_that_calibration_saw_after_a_resume_too() -> None:
    """torchao's tensors take inputs of as many dimensions as their scale."""
    x = batch(BF16, 2, 3)
    first, resumed = model(BF16), model(BF16)
    for m in (first, resumed):
        quantize_(m, QATConfig(CONFIGS["int8-row"]))
    calibrate(first, [x])
    resumed.load_state_dict(first.state_dict())
    quantize_(resumed, QATConfig(step="convert"))
    assert resumed[0].weight.act_quant_scale.shape == (1, 1, 1)
    assert_equal(resumed(x), first(x))
    with pytest.raises(AssertionError):
        resumed(x[0])


def test_torchaos_qat_config_on_a_prepared_layer_converts() -> None:
    """torchao's own quantize_ and QATConfig, step convert, on layers that aoquant prepared and calibrated."""
    x, qat = batch(BF16, 2, 3), model(BF16)
    quantize_(qat, QATConfig(CONFIGS["int8-row"]))
    calibrate(qat, [x])
    want = qat(x)
    torchao_quantize_(qat, TorchaoQATConfig(step="convert"))
    assert type(qat[0].weight.data).__name__ == "Int8Tensor"
    assert_equal(qat(x), want)


NOT_STATIC = (
    Int8StaticActivationInt8WeightConfig(),
    Float8StaticActivationFloat8WeightConfig(granularity=PerRow()),
    Float8StaticActivationFloat8WeightConfig(quantize_and_dequantize_output=True),
)


@pytest.mark.parametrize("config", [*map(QATConfig, NOT_STATIC), CONFIGS["int8-row"], CONFIGS["fp8"]])
def test_what_cannot_be_static_or_was_not_observed_is_refused_by_name(config: Any) -> None:
    with pytest.raises(ValueError, match=r"0 \(48, 64\)"):
        quantize_(model(BF16), config)
