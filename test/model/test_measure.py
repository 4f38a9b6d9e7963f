"""Measurements on one layer: decibels, shares of a weight's values, batches and outputs, and what is put back."""

from __future__ import annotations

import math
from collections import UserDict
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aoquant import quantize_
from aoquant.formats import get_operand
from aoquant.report import measure


@pytest.mark.parametrize(
    ("signal", "noise", "wanted"),
    [
        (100.0, 1.0, 20.0),
        (1.0, 1.0, 0.0),
        (1.0, 100.0, -20.0),
        (0.0, 1.0, -math.inf),
        (1.0, 0.0, math.inf),
        (0.0, 0.0, math.inf),
        (math.nan, 1.0, math.nan),
        (1.0, math.nan, math.nan),
        (math.inf, 1.0, math.inf),
        (math.inf, math.inf, math.nan),
    ],
)
def test_decibels_of_two_energies(signal: float, noise: float, wanted: float) -> None:
    assert measure.decibels(signal, noise) == pytest.approx(wanted, nan_ok=True)


def test_energies_of_two_shapes_are_refused_and_values_with_gradients_are_taken() -> None:
    with pytest.raises(ValueError, match=r"\(2, 3\) and \(3, 2\)"):
        measure.energies(torch.ones(2, 3), torch.ones(3, 2))
    a, b = torch.ones(2, requires_grad=True), torch.tensor([1.0, 2.0], requires_grad=True)
    assert measure.energies(a.detach(), b.detach()) == (2.0, 1.0)
    assert measure.sqnr(a, b) == pytest.approx(10 * math.log10(2.0))


def test_shares_need_the_float_weight_or_the_codes() -> None:
    operand, w = get_operand("nvfp4"), torch.full((4, 64), 0.001)
    w[:, 0] = 100.0
    encoded = operand.encode(w)
    measured, told = (0.0, 0.75), measure.shares(operand, w, encoded)
    assert told == measure.shares(operand, w, None) == measured
    assert measure.shares(operand, None, encoded) == (None, 0.75)
    assert measure.shares(operand, None, None) == (None, None)
    other = operand.encode(torch.ones(4, 64))
    assert measure.shares(operand, w, other) == (0.0, 0.0), "blocks are those that are stored"


def test_packed_weights_whose_values_can_be_told() -> None:
    """Ours, torchao's with a way back, and torchao's Int4Tensor, which has none."""

    class Int4Tensor:
        dequantize = Tensor.dequantize

    class Other(Int4Tensor):
        pass

    packed = nn.Sequential(nn.Linear(64, 32))
    quantize_(packed, "int4-g32")
    assert measure.has_value(packed[0].weight) and measure.has_value(Int4Tensor()) and not measure.has_value(Other())
    with pytest.raises(ValueError, match="Other has no dequantize"):
        measure.packed_value(Other())


@pytest.mark.parametrize("empty", [3, "text", None, [1, 2], {"ids": [1, 2], "name": "x"}, [], {}])
def test_a_batch_without_a_tensor_is_refused(empty: Any) -> None:
    with pytest.raises(ValueError, match=rf"a batch holds no tensor, got {type(empty).__name__}"):
        measure.run(nn.Identity(), empty)


def test_a_batch_with_a_tensor_anywhere_runs() -> None:
    x = torch.ones(2)
    assert measure.run(nn.Identity(), x) is x
    assert measure.run(nn.Identity(), (x,)) is measure.run(nn.Identity(), [x]) is x
    assert measure.run(nn.Identity(), {"input": [1, x]}) == [1, x]
    with pytest.raises(ValueError, match="a batch of 2 parts gives Identity"):
        measure.run(nn.Identity(), (x, x))


class Cache:
    def get_seq_length(self) -> int:
        return 3


@pytest.mark.parametrize("kind", [list, tuple, dict])
def test_a_model_gets_a_copy_of_a_cache_and_its_tensors_themselves(kind: Any) -> None:
    class Kept(nn.Module):
        def forward(self, x: Tensor, cache: Any) -> Any:
            return x, cache

    x, cache = torch.ones(2), Cache()
    given = {"x": x, "cache": cache} if kind is dict else kind((x, cache))
    got, copied = measure.run(Kept(), given)
    assert got is x and copied is not cache and copied.get_seq_length() == 3


FIRST, LOGITS = torch.tensor([1.0]), torch.tensor([2.0])


@pytest.mark.parametrize(
    ("output", "wanted"),
    [
        (FIRST, FIRST),
        ((None, FIRST, LOGITS), FIRST),
        ([FIRST, LOGITS], FIRST),
        ({"hidden": FIRST, "logits": LOGITS}, LOGITS),
        ({"hidden": FIRST, "logits": None}, FIRST),
        ({"loss": 3.0, "hidden": FIRST}, FIRST),
        (UserDict(hidden=FIRST, logits=LOGITS), LOGITS),
        (SimpleNamespace(hidden=FIRST, logits=LOGITS), LOGITS),
    ],
)
def test_the_tensor_of_an_output_that_is_compared(output: Any, wanted: Tensor) -> None:
    assert measure.logits_of(output) is wanted


@pytest.mark.parametrize("output", [None, 3.0, "text", [], {"a": 1}, (None,), SimpleNamespace(hidden=FIRST)])
def test_an_output_without_a_tensor_is_refused(output: Any) -> None:
    with pytest.raises(ValueError, match=f"must be a tensor or hold one, got {type(output).__name__}"):
        measure.logits_of(output)


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_changed_inside_is_put_back(fails: bool) -> None:
    """Also where the block fails."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    net[0].eval(), setattr(net[0], "forward", own := net[0].forward)
    calls: list[str] = []

    def inside(context: AbstractContextManager[None], check: Any) -> None:
        try:
            with context:
                check()
                if fails:
                    raise KeyError
        except KeyError:
            assert fails

    def still() -> None:
        assert not any(m.training for m in net.modules()) and not torch.is_grad_enabled()

    inside(measure.undisturbed(net), still)
    assert [m.training for m in net.modules()] == [True, False, True] and torch.is_grad_enabled()

    handles = (m.register_forward_hook(lambda *given: calls.append("called")) for m in net)
    inside(measure.hooked(handles), lambda: net(torch.ones(2)))
    net(torch.ones(2))
    assert calls == ["called"] * 2

    def other() -> None:
        assert net[0](torch.ones(2)) == net[1](torch.ones(2)) == "other"

    inside(measure.with_forward(net, lambda *given: "other"), other)
    assert vars(net[0])["forward"] is own and "forward" not in vars(net[1])

    inside(measure.having(net, "training", "neither"), lambda: [m.training for m in net] == ["neither"] * 2)
    assert [m.training for m in net] == [False, True]
