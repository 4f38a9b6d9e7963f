"""The gradient that reaches an adapter is that of the values which the base multiplies by: whoever packed them, and
where scales clip them.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from typing import Any

import pytest
import torch
from peft import get_peft_model
from support.adapters import layer, lora
from torch import nn
from torchao.quantization import (
    Float8DynamicActivationFloat8WeightConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8DynamicActivationIntxWeightConfig,
    IntxWeightOnlyConfig,
    PerGroup,
)

from aoquant import Int4WeightConfig, Int8WeightConfig, QATConfig, quantize_
from aoquant.recipes import get_recipe
from aoquant.report.measure import weight_value

CONFIGS: dict[str, Any] = {
    "int4": Int4WeightConfig(32),
    "ao.int8-intx": Int8DynamicActivationIntxWeightConfig(torch.int4, PerGroup(32)),
    "ao.int8-int8": Int8DynamicActivationInt8WeightConfig(),
    "ao.fp8-fp8": Float8DynamicActivationFloat8WeightConfig(),
    "ao.intx": IntxWeightOnlyConfig(torch.int4, PerGroup(32)),
}


def layers(config: Any, targets: list[str], **options: Any) -> Any:
    """Two packed layers, adapters on some."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32)).bfloat16()
    quantize_(model, config)
    return get_peft_model(model, lora(target_modules=targets, **options))


@pytest.mark.parametrize("targets", [["0", "1"], ["0"]], ids=["both", "below"])
@pytest.mark.parametrize("config", [pytest.param(c, id=n) for n, c in CONFIGS.items()])
def test_an_adapter_below_a_packed_layer_gets_the_gradient_of_its_values(config: Any, targets: list[str]) -> None:
    model = layers(config, targets)
    first, second = model.base_model.model
    x, g = torch.randn(16, 64, dtype=torch.bfloat16), torch.randn(16, 32, dtype=torch.bfloat16)
    with torch.no_grad():
        y = model(x)
    out = model(x)
    assert torch.equal(out, y)
    out.backward(g)
    w = weight_value(getattr(second, "base_layer", second)).float()
    if "1" in targets:
        w = w + second.get_delta_weight("default")
    a, b, s = first.lora_A["default"].weight, first.lora_B["default"].weight, first.scaling["default"]
    dh = g.float() @ w
    for got, want in (
        (b.grad, s * dh.t() @ (x.float() @ a.t())),
        (a.grad, s * (dh @ b).t() @ x.float()),
    ):
        assert float((got - want).detach().norm() / want.detach().norm()) < 0.01  # bf16


def test_under_autocast_the_gradient_has_the_dtype_of_the_computation() -> None:
    """float32 layers compute in bfloat16: so does their backward, and what leaves it is the input's float32 again."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32))
    quantize_(model, CONFIGS["ao.int8-intx"])
    tuned = get_peft_model(model, lora(target_modules=["0"]))
    x, g = torch.randn(16, 64), torch.randn(16, 32)
    grads = []
    for dtype in (None, torch.bfloat16):
        tuned.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            y = tuned(x)
        assert y.dtype == (dtype or torch.float32)
        y.backward(g.to(y.dtype))
        grads.append(tuned.base_model.model[0].lora_B["default"].weight.grad)
    assert grads[0].dtype == grads[1].dtype == torch.float32 and not torch.equal(*grads)
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=0.02 * float(grads[0].abs().max()))


def test_a_bias_that_trains_gets_its_gradient() -> None:
    model = layers(CONFIGS["ao.int8-int8"], ["0", "1"], bias="all")
    g = torch.randn(2, 3, 32, dtype=torch.bfloat16)
    model(torch.randn(2, 3, 64, dtype=torch.bfloat16)).backward(g)
    torch.testing.assert_close(model.base_model.model[1].base_layer.bias.grad, g.sum((0, 1)))


def test_a_tensor_whose_values_nobody_can_tell_is_refused_by_name() -> None:
    model = layers(dataclasses.replace(get_recipe("torchao-int4-cpu").make(), group_size=32), ["0"])
    x = torch.randn(16, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        y = model(x)
    with pytest.raises(ValueError, match=r"^1: a gradient has to pass through its .*, which has no dequantize"):
        model(x)
    assert torch.equal(model.eval().requires_grad_(False)(x), y)


def test_values_that_a_learned_weight_scale_clips_give_adapters_no_gradient() -> None:
    with pytest.warns(UserWarning, match="peft froze 1 learned scales"):
        adapted, x, g = layer(Int8WeightConfig(), scales="learned")
    y = adapted(x)
    y.backward(g)
    a, b, s = adapted.lora_A["default"].weight, adapted.lora_B["default"].weight, adapted.scaling["default"]
    twin = copy.deepcopy(adapted.base_layer)
    twin.weight.data = adapted.merged_weight(adapted.adapted().detach(), ["default"]).detach()
    twin.weight.requires_grad_()
    want = twin(x.detach())
    want.backward(g)
    assert torch.equal(y, want)
    clipped = twin.weight.grad == 0
    assert 0 < clipped.sum() < clipped.numel() / 2
    torch.testing.assert_close(b.grad, s * twin.weight.grad @ a.t(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(a.grad, s * b.t() @ twin.weight.grad, rtol=1e-4, atol=1e-5)


def test_learned_scales_that_peft_froze_are_named_and_can_be_trained() -> None:
    model = nn.Sequential(nn.Linear(64, 32))
    quantize_(model, QATConfig(Int8WeightConfig(), step="prepare", scales="learned"))
    with pytest.warns(UserWarning, match=r"peft froze 1 learned scales \(0.weight_scale, .*requires_grad_"):
        adapted = get_peft_model(model, lora(target_modules=["0"]))
    scale = adapted.base_model.model[0].base_layer.weight_scale
    scale.requires_grad_(True)
    adapted(torch.randn(4, 64)).sum().backward()
    assert scale.grad.abs().sum() > 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scale.requires_grad_(False)
        adapted.add_adapter("other", lora(target_modules=["0"]))
