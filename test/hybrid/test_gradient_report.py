"""`report(..., gradients=True)`: dx and dW of every prepared layer, in dB against the same layer in float."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from support.training_cases import batch, student
from torch import Tensor, nn

import aoquant
from aoquant import Cast, HybridConfig, quantize_
from aoquant.distributed import amax
from aoquant.linear.prepared import RANDOM
from aoquant.recipes import get_recipe
from aoquant.report.measure import sqnr


def models(config: Any) -> tuple[nn.Sequential, nn.Sequential, Tensor]:
    """A float model, its prepared copy, and an input."""
    plain = student(None)
    model = copy.deepcopy(plain)
    quantize_(model, config)
    return plain, model, batch(96)[0]


def rows(plain: nn.Module, model: nn.Module, x: Tensor) -> list[Any]:
    return list(aoquant.report(plain, model, x, gradients=True, progress=False).layers)


def test_each_layer_alone_against_float() -> None:
    plain, model, x = models(HybridConfig.fwd_bwd("mxfp8", "te-nvfp4"))
    found = aoquant.report(plain, model, x, gradients=True, progress=False)
    # the last layer by hand: what it meets, and what it makes of it
    z = model[1](model[0](x)).detach().requires_grad_()
    y = model[2](z)
    dy = 2 * y.detach() / y.numel()
    dx, dw = torch.autograd.grad(y, (z, model[2].weight), dy)
    row = found.layers[1]
    assert row.input_gradient_sqnr_db == pytest.approx(sqnr(dy @ model[2].weight.detach(), dx), abs=0.01)
    assert row.weight_gradient_sqnr_db == pytest.approx(sqnr(dy.t() @ z.detach(), dw), abs=0.01)
    assert "dx dB" in found.to_markdown() and "input_gradient_sqnr_db" in found.to_csv()
    found = aoquant.report(plain, model, x, progress=False)
    assert found.layers[0].input_gradient_sqnr_db is None and "dx dB" not in found.to_markdown()


def test_a_backward_in_high_precision_of_the_originals_is_floats() -> None:
    for row in rows(*models(HybridConfig.fwd_bwd("mxfp8", None).replaced(dgrad_weight=Cast(None)))):
        for value in (row.input_gradient_sqnr_db, row.weight_gradient_sqnr_db):
            assert value is not None and (value == math.inf or value > 100)


def test_the_model_stays_as_it_is() -> None:
    plain, model, x = models(get_recipe("nvfp4-training").prepare())
    model[0].weight.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    found = rows(plain, model, x)
    assert all(r.weight_gradient_sqnr_db is not None for r in found), "a frozen layer has a gradient too"
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items()) and any(RANDOM in k for k in before)
    assert all(p.grad is None for p in model.parameters()) and not model[0].weight.requires_grad


def test_delayed_scales_do_not_advance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither their state nor other ranks notice a report, and a second one finds the same."""
    plain, model, x = models(HybridConfig.fwd_bwd("te-fp8-tensor", "te-fp8-tensor", amax_history=16))
    for scale in (1, 3):
        (model(scale * x).square().sum()).backward()
    model.zero_grad()
    before = copy.deepcopy(model.state_dict())
    assert model[0].amax_history.count_nonzero() == 6

    def asked(*args: object) -> None:
        raise AssertionError("a collective")

    monkeypatch.setattr(amax, "largest", asked)
    one, two = rows(plain, model, x), rows(plain, model, x)
    assert one == two and all(r.input_gradient_sqnr_db is not None for r in one)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
