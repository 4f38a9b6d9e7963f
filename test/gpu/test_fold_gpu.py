"""Folds of calibrated PTQ on a GPU: the float model computes what it did, and the deployed model is exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models import llama
from torch import Tensor

import aoquant
from aoquant import CalibrateConfig, Int8WeightConfig, NVFP4WeightConfig, QATConfig, calibrate_ptq, quantize_

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*tokens for K", "ignore:R1 unties")]
METHODS: dict[str, Any] = {
    "int4": ("int4-g32", "r1+r2+awq+clip+gptq"),
    "nvfp4": (NVFP4WeightConfig(), "awq+gptq"),
    "int8": (Int8WeightConfig(activation="int8-row"), "smoothquant"),
}


def model(dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    net = llama(tied=True, dtype=dtype)
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn_like(parameter)
    return net.cuda()


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 128, (4, 40), generator=generator).cuda() for _ in range(2)]


@torch.no_grad()
def outputs(net: Any) -> Tensor:
    return net(batches()[0]).logits


@pytest.mark.parametrize("name", METHODS)
def test_packed_prepared_and_converted_are_equal(name: str) -> None:
    recipe, method = METHODS[name]
    packed, prepared = model(torch.bfloat16), model(torch.bfloat16)
    calibrate_ptq(packed, batches(), CalibrateConfig(recipe, method))
    calibrate_ptq(prepared, batches(), CalibrateConfig(recipe, method), step="prepare")
    wanted = outputs(packed)
    assert torch.equal(outputs(prepared), wanted)
    quantize_(prepared, QATConfig(step="convert"))
    assert torch.equal(outputs(prepared), wanted)


def test_the_float_model_computes_what_it_did() -> None:
    net = model(torch.float32)
    wanted = outputs(net)
    calibrate_ptq(net, batches(), CalibrateConfig("int4-g32", "r1+r2+awq"), step="prepare")
    aoquant.set_fake_quant(net, False)
    assert (outputs(net) - wanted).norm() < 1e-3 * wanted.norm()  # TF32 may be on
