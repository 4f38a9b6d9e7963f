"""What conversion keeps: the float weights until all is done, or one layer at a time, with what can fail tried
first.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from support.expert_cases import made
from torch import Tensor, nn
from torchao.quantization import FqnToConfig

import aoquant.quantize as module
from aoquant import NVFP4WeightConfig, PackedTensor, QATConfig, quantize_
from aoquant.planning.changes import Change


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 32), nn.Linear(32, 16)).bfloat16()


class Packer:
    """`pack`, which counts, remembers how many of the first weights were alive, and raises when it is time."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, weights: list[Tensor], at: int, error: type[BaseException]
    ) -> None:
        self.calls, self.at, self.error = 0, at, error
        self.alive: list[int] = []
        self.weights = [weakref.ref(w) for w in weights]
        self.real = module.pack
        monkeypatch.setattr(module, "pack", self)

    def __call__(self, change: Change, weight: Tensor, device: Any) -> Tensor:
        gc.collect()
        self.alive.append(sum(w() is not None for w in self.weights))
        self.calls += 1
        if self.calls == self.at:
            raise self.error("planted")
        return self.real(change, weight, device)


@pytest.mark.parametrize("undo", [True, None], ids=["asked for", "by default on a CPU"])
@pytest.mark.parametrize("prepare", [True, False], ids=["convert", "quantize"])
def test_an_interrupt_leaves_the_model_as_it_was(
    monkeypatch: pytest.MonkeyPatch, undo: bool | None, prepare: bool
) -> None:
    m = model()
    if prepare:
        quantize_(m, QATConfig(NVFP4WeightConfig()))
    before = [(type(layer), layer.weight) for layer in m]
    packer = Packer(monkeypatch, [layer.weight for layer in m], 3, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt) as caught:
        quantize_(m, QATConfig(step="convert") if prepare else NVFP4WeightConfig(), undo=undo)
    assert not hasattr(caught.value, "__notes__")
    assert packer.alive == [3, 3, 3]
    assert all(type(layer) is kind and layer.weight is w for layer, (kind, w) in zip(m, before, strict=True))


def test_without_undo_weights_go_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    m = model()
    packer = Packer(monkeypatch, [layer.weight for layer in m], 0, KeyboardInterrupt)
    quantize_(m, NVFP4WeightConfig(), undo=False)
    # two kinds beside the first layer's are tried before anything is touched
    assert packer.alive == [3, 3, 3, 2, 1]
    assert all(type(layer.weight.data) is PackedTensor for layer in m)


def test_without_undo_a_packer_that_refuses_is_met_before_anything_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    m = model()
    Packer(monkeypatch, [], 2, ValueError)
    with pytest.raises(ValueError, match="planted") as caught:
        quantize_(m, NVFP4WeightConfig(), undo=False)
    assert not hasattr(caught.value, "__notes__")
    assert all(type(layer.weight) is nn.Parameter for layer in m)


def test_without_undo_an_interrupt_says_what_is_lost_and_convert_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    m, x = model(), torch.randn(3, 64, dtype=torch.bfloat16)
    quantize_(m, QATConfig(NVFP4WeightConfig()))
    y = m(x)
    with monkeypatch.context() as patch:
        Packer(patch, [], 4, KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt) as caught:
            quantize_(m, QATConfig(step="convert"), undo=False)
    assert "float weights are gone" in caught.value.__notes__[0]
    assert [type(layer.weight.data) is PackedTensor for layer in m] == [True, False, False]
    quantize_(m, QATConfig(step="convert"))
    assert torch.equal(m(x), y)


@pytest.mark.parametrize("at", [1, 2], ids=["nothing done", "a layer done"])
def test_only_weights_that_are_packed_are_said_to_be_lost(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """With experts to follow, too."""
    m = nn.ModuleList([nn.Linear(64, 32), nn.Linear(64, 32), made("mixtral", "eager")]).bfloat16()
    Packer(monkeypatch, [], at, KeyboardInterrupt)
    config = FqnToConfig({"_default": NVFP4WeightConfig(), "2.experts": NVFP4WeightConfig()})
    with pytest.raises(KeyboardInterrupt) as caught:
        quantize_(m, config, undo=False)
    assert type(m[0].weight.data) is (PackedTensor if at > 1 else Tensor)
    assert hasattr(caught.value, "__notes__") == (at > 1)


@pytest.mark.parametrize("undo", [True, False])
def test_experts_that_are_packed_are_said_to_be_lost_unless_they_come_back(
    monkeypatch: pytest.MonkeyPatch, undo: bool
) -> None:
    m, real, done = made("mixtral", "eager"), module.apply_stack, list[Change]()

    def interrupted(stack: Change, device: Any) -> None:
        if done:
            raise KeyboardInterrupt
        real(stack, device)
        done.append(stack)

    monkeypatch.setattr(module, "apply_stack", interrupted)
    before = dict(m.named_parameters())
    with pytest.raises(KeyboardInterrupt) as caught:
        quantize_(m, NVFP4WeightConfig(), undo=undo)
    assert hasattr(caught.value, "__notes__") != undo
    assert [w is before[name] for name, w in m.named_parameters()].count(False) == (0 if undo else 1)


def test_tied_weights_are_packed_once_without_undo() -> None:
    m = nn.Sequential(nn.Linear(64, 32), nn.Linear(64, 32), nn.Linear(32, 16)).bfloat16()
    m[1].weight = m[0].weight
    quantize_(m, NVFP4WeightConfig(), undo=False)
    assert m[0].weight is m[1].weight
    assert type(m[0].weight.data) is PackedTensor
