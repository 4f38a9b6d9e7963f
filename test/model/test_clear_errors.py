"""Mistakes that were met with an error about something else, or with none."""

from __future__ import annotations

import copy

import pytest
import torch
from support.moe_models import model_of
from torch import Tensor, nn
from torchao.quantization import FqnToConfig

from aoquant import HybridConfig, Int8WeightConfig, QATConfig, calibrate, quantize_
from aoquant.recipes import get_recipe


@pytest.mark.parametrize("assign", [True, False])
@pytest.mark.parametrize("name", ["int4-g32", "nvfp4", "torchao-int8", "torchao-fp8"])
def test_codes_are_not_loaded_into_a_prepared_layer(name: str, assign: bool) -> None:
    prepared = nn.Sequential(nn.Linear(64, 64)).bfloat16()
    quantize_(prepared, get_recipe(name).prepare())
    converted = copy.deepcopy(prepared)
    quantize_(converted, QATConfig(step="convert"))
    with pytest.raises(ValueError, match=r"^0\.weight: "):
        prepared.load_state_dict(converted.state_dict(), assign=assign)
    assert type(prepared[0].weight) is nn.Parameter


class OneInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y


def test_a_batch_with_labels_is_told_of_its_parts() -> None:
    model = OneInput()
    quantize_(model, QATConfig(Int8WeightConfig(activation="int8-tensor-static"), step="prepare"))
    x, y = torch.randn(4, 32), torch.randn(4)
    with pytest.raises(ValueError, match="a batch of 2 parts gives OneInput"):
        calibrate(model, [(x, y)])
    calibrate(model, [(x,), [x], {"x": x}, x])
    assert model.linear.calibrated  # type: ignore[union-attr]


def test_delayed_scaling_of_experts_is_refused_as_such() -> None:
    config = HybridConfig.fwd_bwd("te-fp8-tensor", "te-fp8-tensor", amax_history=4)
    experts = FqnToConfig({r"re:.*experts\.(gate_up_proj|down_proj)": config})
    with pytest.raises(ValueError, match="keep no history of maxima"):
        quantize_(model_of("mixtral"), experts)
