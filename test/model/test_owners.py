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


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm"])
def test_a_weight_that_a_hook_recomputes_is_refused(norm: str) -> None:
    model = nn.Sequential(getattr(nn.utils, norm)(nn.Linear(64, 64)))
    with pytest.raises(ValueError, match=rf"0 \(64, 64\): .*remove_{norm}"):
        quantize_(model, PREPARE)
    getattr(nn.utils, f"remove_{norm}")(model[0])
    quantize_(model, PREPARE)
    model(torch.randn(2, 64))


def test_a_pruned_weight_is_refused_until_pruning_is_permanent() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    prune.random_unstructured(model[0], "weight", 0.3)
    with pytest.raises(ValueError, match=r"prune.remove\(layer, 'weight'\)"):
        quantize_(model, PREPARE)
    prune.remove(model[0], "weight")
    quantize_(model, PREPARE)
    prune.random_unstructured(model[0], "weight", 0.3)
    with pytest.raises(ValueError, match=r"prune.remove\(layer, 'weight'\)"):
        quantize_(model, QATConfig(step="convert"))
    prune.remove(model[0], "weight")
    x = torch.randn(2, 64)
    y = model(x)
    quantize_(model, QATConfig(step="convert"))
    assert torch.equal(model(x), y)


def test_a_parametrized_layer_is_not_left_in_fake_quantisation() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.randn(2, 64)
    quantize_(model, PREPARE)
    nn.utils.parametrizations.weight_norm(model[0])
    y = model(x)
    with pytest.raises(ValueError, match=r"^0: .*remove_parametrizations"):
        quantize_(model, QATConfig(step="convert"))
    assert torch.equal(model(x), y)
    nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    quantize_(model, QATConfig(step="convert"))
    assert torch.equal(model(x), y)


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
