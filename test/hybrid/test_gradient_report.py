"""`report(..., gradients=True)`: dx and dW of every prepared layer, in dB against the same layer in float."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.training_cases import batch, student
from torch import Tensor, nn

import aoquant
from aoquant import Cast, HybridConfig, PackedWeightConfig, QATConfig, quantize_, set_fake_quant
from aoquant.distributed import amax
from aoquant.linear.prepared import RANDOM
from aoquant.recipes import get_recipe
from aoquant.report.measure import sqnr
from aoquant.report.model_gradients import gradients


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


class Again(nn.Module):
    """Run one layer twice, and return what `made` makes of its two outputs; a second layer does not reach them."""

    def __init__(self, made: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.beside, self.spare = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.made = made
        quantize_(self, HybridConfig.fwd_bwd("mxfp8", "te-nvfp4"))

    def forward(self, x: Tensor) -> Any:
        self.beside(x)
        y = self.layer(x)
        return self.made(y, self.layer(torch.tanh(y)))


def test_all_calls_of_a_layer_count_and_layers_without_a_gradient_have_no_figures() -> None:
    model, x = Again(lambda y, z: {"loss": (y * z).sum()}), batch(96)[0].view(2, 48, 64)
    found = gradients(model, x)
    assert found.keys() == {id(model.layer)}
    w, y = model.layer.weight, model.layer(x)
    z = model.layer(torch.tanh(y))
    wanted: list[list[Tensor]] = [[], []]
    got: list[list[Tensor]] = [[], []]
    for given, dy in zip((x, torch.tanh(y)), torch.autograd.grad((y * z).sum(), (y, z)), strict=True):
        given = given.detach().requires_grad_()
        for i, t in enumerate(torch.autograd.grad(model.layer(given), (given, w), dy)):
            got[i].append(t.flatten())
        wanted[0].append((dy @ w).flatten())
        wanted[1].append((dy.flatten(0, 1).t() @ given.flatten(0, 1)).flatten())
    figures = [sqnr(torch.cat(a), torch.cat(b)) for a, b in zip(wanted, got, strict=True)]
    assert list(found[id(model.layer)].values()) == pytest.approx(figures, abs=0.01)
    assert list(found[id(model.layer)]) == ["input_gradient_sqnr_db", "weight_gradient_sqnr_db"]


def test_the_loss_that_a_model_returns_is_differentiated() -> None:
    """As a field or under its name; without one, the mean square of its outputs is."""
    x = batch(96)[0]
    kinds: dict[str, Callable[[Tensor, Tensor], Any]] = {
        "field": lambda y, z: SimpleNamespace(loss=z.exp().mean(), logits=z),
        "name": lambda y, z: {"logits": z, "loss": z.exp().mean()},
        "none": lambda y, z: SimpleNamespace(loss=None, logits=z),
        "number": lambda y, z: {"loss": 1.0, "logits": z},
        "tensor": lambda y, z: z,
        "square": lambda y, z: {"loss": z.square().mean()},
    }
    found = {kind: [*gradients(Again(made), x).values()] for kind, made in kinds.items()}
    assert found["field"] == found["name"] != found["tensor"]
    assert found["none"] == found["number"] == found["tensor"] == found["square"]


def test_layers_that_do_not_quantise_have_no_figures() -> None:
    x, off = batch(96)[0], student(HybridConfig.fwd_bwd("mxfp8", "te-nvfp4"))
    set_fake_quant(off[0], False)
    assert gradients(off, x).keys() == {id(off[2])} and gradients(student(None), x) == {}


def test_a_model_that_does_not_run_has_no_gradients() -> None:
    plain, model, x = models(QATConfig(PackedWeightConfig("fp8-row", "fp8-tensor-static"), step="prepare"))
    for asked in (False, True):
        found = aoquant.report(plain, model, x, gradients=asked, progress=False)
        assert "calibrate" in found.output.warning
        assert all(row.input_gradient_sqnr_db is None for row in found.layers)
    other = copy.deepcopy(plain)
    quantize_(other, HybridConfig.fwd_bwd("mxfp8", "te-nvfp4"))
    found = aoquant.report(model, other, x, gradients=True, progress=False)  # its own do not need model a
    assert "calibrate" in found.output.warning
    assert all(row.input_gradient_sqnr_db is not None for row in found.layers)
