"""torchao's fake-quantisation configs: our prepared layer equals torchao's own, and, unlike torchao's, converts to what
it trained.

`QATConfig(activation_config=...)` alone leaves the weight in high precision: torchao accepts it and its convert
crashes, or forgets the activations; ours packs the weight as it is, with the activation's format.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.linear_cases import BF16, F32, assert_equal, cuda_division, data, dtype_name
from torch import Tensor, nn
from torchao.prototype.qat import MXFakeQuantizeConfig, NVFP4FakeQuantizeConfig
from torchao.quantization import PerRow, PerTensor
from torchao.quantization import quantize_ as torchao_quantize_
from torchao.quantization.qat import IntxFakeQuantizeConfig
from torchao.quantization.qat import QATConfig as TorchaoQATConfig
from torchao.quantization.qat.fake_quantize_config import Float8FakeQuantizeConfig, Int4WeightFakeQuantizeConfig

from aoquant import PackedTensor, PackedWeightConfig, QATConfig, quantize_

TOKENS = IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
TOKENS_BF16 = IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False, scale_precision=BF16)
GROUPS = IntxFakeQuantizeConfig(torch.int4, group_size=32)
GROUPS_BF16 = IntxFakeQuantizeConfig(torch.int4, group_size=32, scale_precision=BF16)
# name -> (weight_config, activation_config): torchao's fake-quantised layer is the reference
SAME: dict[str, tuple[Any, Any]] = {
    "int4 groups": (GROUPS, None),
    "int4 groups, bf16 scales": (GROUPS_BF16, None),
    "int3 channels, int8 tokens": (IntxFakeQuantizeConfig(torch.int3, "per_channel"), TOKENS),
    "int4 groups, int8 tokens": (GROUPS, TOKENS),
    "int8 tokens alone": (None, TOKENS),
    "int8 tokens alone, bf16 scales": (None, TOKENS_BF16),
}
# torchao dequantises before the GEMM, has no such pair, or (asymmetric weights) takes a float zero point for an integer
OURS: dict[str, tuple[Any, Any]] = {
    "asymmetric int4": (IntxFakeQuantizeConfig(torch.int4, group_size=32, is_symmetric=False), None),
    "int4 MSLK": (Int4WeightFakeQuantizeConfig(32, BF16), None),
    "fp8 rows with bounds": (Float8FakeQuantizeConfig(hp_value_ub=1.0), Float8FakeQuantizeConfig(hp_value_lb=0.5)),
    "fp8 tensor alone": (None, Float8FakeQuantizeConfig(granularity=PerTensor())),
    "fp8 rows alone": (None, Float8FakeQuantizeConfig(torch.float8_e5m2, PerRow())),
    "mxfp4": (MXFakeQuantizeConfig(), MXFakeQuantizeConfig()),
    "mxfp8 alone": (None, MXFakeQuantizeConfig(torch.float8_e4m3fn)),
    "mxfp4 weights alone": (MXFakeQuantizeConfig(), None),
    "nvfp4": (NVFP4FakeQuantizeConfig(), NVFP4FakeQuantizeConfig(False)),
    "nvfp4 alone": (None, NVFP4FakeQuantizeConfig()),
}
TOO = [pytest.param(*pair, id=name) for name, pair in (SAME | OURS).items()]


def model(dtype: torch.dtype = BF16) -> nn.ModuleDict:
    linear = nn.Linear(96, 24, dtype=dtype)
    with torch.no_grad():
        linear.weight.copy_(data("normal", 24, 96, dtype))
    return nn.ModuleDict({"linear": linear})


def forward(linear: Any, x: Tensor) -> Tensor:
    """torchao's fake-quantised layer, with a GPU's divisions for the weight: in float32 they are an ulp apart."""
    with cuda_division():
        w = linear.weight if linear.weight_fake_quantizer is None else linear.weight_fake_quantizer(linear.weight)
    x = x if linear.activation_fake_quantizer is None else linear.activation_fake_quantizer(x)
    return nn.functional.linear(x, w, linear.bias)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=dtype_name)
@pytest.mark.parametrize(("weight", "activation"), SAME.values(), ids=SAME)
def test_prepared_equals_torchaos_fake_quantised_layer(weight: Any, activation: Any, dtype: torch.dtype) -> None:
    ours, theirs = (copy.deepcopy(model(dtype)) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    quantize_(ours, QATConfig(weight_config=weight, activation_config=activation))
    torchao_quantize_(theirs, TorchaoQATConfig(weight_config=weight, activation_config=activation))
    for kind in ("normal", "outlier", "mixed"):
        x = data(kind, 6, 96, dtype, 1).view(2, 3, 96)
        y = ours["linear"](x)
        assert_equal(y, forward(theirs["linear"], x), kind)
        if dtype == BF16:
            assert_equal(y, theirs["linear"](x), kind)


@pytest.mark.parametrize(("weight", "activation"), TOO)
def test_converted_equals_prepared_and_the_gradient_points_right(weight: Any, activation: Any) -> None:
    qat, plain = model(), model()
    plain.load_state_dict(qat.state_dict())
    # torchao's own QATConfig says the same
    quantize_(qat, TorchaoQATConfig(weight_config=weight, activation_config=activation))
    x, g = data("normal", 32, 96, BF16, 1), data("normal", 32, 24, BF16, 2)
    y = qat["linear"](x)
    y.backward(g)
    plain["linear"](x).backward(g)
    for got, want in zip(qat["linear"].parameters(), plain["linear"].parameters(), strict=True):
        assert torch.cosine_similarity(got.grad.double().flatten(), want.grad.double().flatten(), 0) >= 0.99
    quantize_(qat, QATConfig(step="convert"))
    assert isinstance(qat["linear"].weight, PackedTensor)
    assert_equal(qat["linear"](x), y)


def test_activations_alone_keep_the_weight_as_it_is() -> None:
    qat = model()
    weight = qat["linear"].weight.detach().clone()
    quantize_(qat, QATConfig(activation_config="mxfp4"))
    quantize_(qat, QATConfig(step="convert"))
    packed = qat["linear"].weight
    assert_equal(packed.qdata, weight)
    assert_equal(packed.dequantize(), weight)
    assert (packed.format, packed.activation) == ("high-precision", "mxfp4")
    x = data("normal", 6, 96, BF16, 1)
    assert not torch.equal(qat["linear"](x), nn.functional.linear(x, weight, qat["linear"].bias))


@pytest.mark.parametrize(("weight", "activation"), [("int4-g32", "int8-row"), ("nvfp4", "nvfp4"), ("mxfp4", None)])
def test_names_of_formats_are_the_config_of_both(weight: str, activation: str | None) -> None:
    x, outputs = data("normal", 6, 96, BF16, 1), []
    start = model().state_dict()
    for config in (
        QATConfig(weight_config=weight, activation_config=activation),
        QATConfig(PackedWeightConfig(weight, activation)),
    ):
        qat = model()
        qat.load_state_dict(start)
        quantize_(qat, config)
        outputs.append(qat["linear"](x))
    assert_equal(*outputs)
    assert not torch.equal(outputs[0], nn.functional.linear(x, start["linear.weight"], start["linear.bias"]))


def test_torchaos_activations_alone_do_not_convert() -> None:
    """The bug that this replaces: convert crashes on a weight quantiser that is None."""
    theirs = model()
    torchao_quantize_(theirs, TorchaoQATConfig(activation_config=TOKENS))
    with pytest.raises(AttributeError):
        torchao_quantize_(theirs, TorchaoQATConfig(step="convert"))
