"""Layers and models whose weight or forward is another object's are refused by name, with what to do."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from aoquant import Int4WeightConfig, QATConfig, quantize_, report, verify

PREPARE = QATConfig(Int4WeightConfig(32), step="prepare")


# how another object takes hold of a layer's weight, how it lets go, and what the refusal says to do
HOLDS: dict[str, tuple[Callable[[nn.Module], Any], Callable[[nn.Module], Any], str]] = {
    "weight_norm": (nn.utils.weight_norm, nn.utils.remove_weight_norm, "remove_weight_norm"),
    "spectral_norm": (nn.utils.spectral_norm, nn.utils.remove_spectral_norm, "remove_spectral_norm"),
    "pruned": (
        lambda layer: prune.random_unstructured(layer, "weight", 0.3),
        lambda layer: prune.remove(layer, "weight"),
        r"prune.remove\(layer, 'weight'\)",
    ),
    "parametrized": (
        nn.utils.parametrizations.weight_norm,
        lambda layer: nn.utils.parametrize.remove_parametrizations(layer, "weight"),
        r"(remove_parametrizations|ParametrizedLinear)",
    ),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
@pytest.mark.parametrize("prepared", [False, True], ids=["prepare", "convert"])
@pytest.mark.parametrize("kind", HOLDS)
def test_a_weight_that_another_object_computes_is_refused_until_it_lets_go(kind: str, prepared: bool) -> None:
    hold, release, advice = HOLDS[kind]
    model, x = nn.Sequential(nn.Linear(64, 64)), torch.randn(2, 64)
    if prepared:
        quantize_(model, PREPARE)
    hold(model[0])
    step = QATConfig(step="convert") if prepared else PREPARE
    with pytest.raises(ValueError, match=rf"\b0\b.*{advice}"):
        quantize_(model, step)
    release(model[0])
    y = model(x)
    quantize_(model, step)
    assert not prepared or torch.equal(model(x), y)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x)


class Wrapped:
    """A callable object around a forward, as accelerate's conversion to float32 is."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward

    def __call__(self, *args: Any) -> Any:
        return self.forward(*args)

    def __deepcopy__(self, memo: Any) -> Wrapped:
        return self


def closure(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapper(*args: Any) -> Any:
        return forward(*args)

    return wrapper


WRAPPERS: dict[str, Callable[[Callable[..., Any]], Any]] = {
    "closure": closure,
    "closures": lambda forward: closure(closure(forward)),
    "object": Wrapped,
    "lambda": lambda forward: lambda x: forward(x),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_copy_whose_forward_runs_the_original_is_refused_with_what_to_do(wrap: Callable[..., Any]) -> None:
    model, x = Model(), torch.randn(2, 64)
    quantize_(model, PREPARE)
    model.forward = wrap(model.forward)
    model(x)
    copied = copy.deepcopy(model)
    with pytest.raises(ValueError, match=r"Model .*del model.forward"):
        quantize_(copied, QATConfig(step="convert"))
    with pytest.raises(ValueError, match=r"model_b: .*del model.forward"):
        report(model, copied, x)
    del copied.forward
    quantize_(copied, QATConfig(step="convert"))
    assert verify(model, copied, x).min_sqnr == float("inf")


def test_a_forward_that_is_the_models_own_is_no_other_models() -> None:
    model, x = Model(), torch.randn(2, 64)

    def own(self: Model, x: Tensor) -> Tensor:
        return self.up(x)

    model.forward = types.MethodType(own, model)
    quantize_(model, PREPARE)
    copied = copy.deepcopy(model)  # binds the method to the copy
    quantize_(copied, QATConfig(step="convert"))
    verify(model, copied, x)


def test_verify_says_which_model_does_not_run_a_layer() -> None:
    class Skips(Model):
        skips = False

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.up.matrix().t() + self.up.bias if self.skips else self.up(x)

    model = Skips()
    quantize_(model, PREPARE)
    converted = copy.deepcopy(model)
    quantize_(converted, QATConfig(step="convert"))
    model.skips = True
    with pytest.raises(ValueError, match=r"up: .*0 .*model_a and 1 in model_b"):
        verify(model, converted, torch.randn(2, 64))
