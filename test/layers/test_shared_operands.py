"""Layers without gradients that read one input: what they share of its encoding, and when they do not."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from support.cpu_library import with_library
from torch import Tensor, nn

from aoquant import quantize_
from aoquant.layers.shared_operands import Parent, shared
from aoquant.ops import codec

PARENT = Parent()
library = pytest.fixture(with_library)


class Encoder:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor, layer: int, how: str = "nvfp4", parent: Parent | None = PARENT) -> Tensor:
        def encode() -> Tensor:
            self.calls += 1
            return x.clone()

        made = shared(x, (how, torch.float32), layer, parent, encode)
        assert torch.equal(made, x)
        return made


def test_siblings_share_and_a_layer_takes_once() -> None:
    encode, x = Encoder(), torch.randn(3, 4)
    first = encode(x, 1)
    assert encode(x, 2) is first and encode(x, 3) is first and encode.calls == 1
    again = encode(x, 1)
    assert again is not first and encode(x, 2) is again and encode.calls == 2


def test_a_write_that_no_version_counts_is_not_missed_by_the_same_layer() -> None:
    encode, x = Encoder(), torch.zeros(3, 4)
    for step in range(3):
        x.data.fill_(step)  # a buffer that is used again
        for layer in (1, 2, 3):
            encode(x, layer)
    assert encode.calls == 3


def test_other_inputs_and_versions_are_encoded() -> None:
    encode, x = Encoder(), torch.randn(3, 4)
    encode(x, 1)
    encode(x.clone(), 2)
    encode(x.view(3, 4), 3)
    assert encode.calls == 3
    encode(x, 4)
    x.mul_(2)
    encode(x, 5)
    assert encode.calls == 5
    encode(x, 6, "fp8")
    assert encode.calls == 6
    with torch.inference_mode():
        y = torch.randn(3, 4)
        encode(y, 1), encode(y, 2)
    assert encode.calls == 8


def test_nothing_outlives_its_input() -> None:
    encode, x = Encoder(), torch.randn(3, 4)
    made = weakref.ref(encode(x, 1))
    assert made() is not None
    del x
    gc.collect()
    assert made() is None


def test_threads_do_not_share() -> None:
    encode, x = Encoder(), torch.randn(3, 4)
    encode(x, 1)
    thread = threading.Thread(target=encode, args=(x, 2))
    thread.start()
    thread.join()
    assert encode.calls == 2
    encode(x, 3)
    assert encode.calls == 2


def test_strangers_and_inputs_that_others_write_are_encoded() -> None:
    """None of these layers has seen the input, and no version counts the writes."""
    encode, x = Encoder(), torch.zeros(3, 4)
    for layer, parent in ((1, PARENT), (2, Parent()), (3, None), (4, None), (5, PARENT)):
        encode(x, layer, parent=parent)
        x.data.fill_(layer)
    buffer = np.zeros((3, 4), np.float32)
    x = torch.from_numpy(buffer)
    for layer in (1, 2, 3):
        encode(x, layer)
        buffer[:] = layer
    exported = torch.zeros(3, 4)
    view = exported.numpy()
    for layer in (1, 2, 3):
        encode(exported, layer)
        view[:] = layer
    assert encode.calls == 11


class Attention(nn.Module):
    """q and k have one parent, and so have the layers of `inner`; those of the list and the sequence have none."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(64, 32), nn.Linear(64, 32)
        self.heads = nn.ModuleList([nn.Linear(64, 32) for _ in range(2)])
        self.inner = nn.Sequential(nn.Linear(64, 32))

    def forward(self, x: Tensor) -> list[Tensor]:
        return [self.q(x), self.k(x)]


def to_zero(x: Tensor, buffer: np.ndarray | None) -> None:
    """By a write that no version counts."""
    if buffer is None:
        x.data.zero_()
    else:
        buffer[:] = 0


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("recipe", ["int8", "int8-int4"])
@pytest.mark.parametrize("numpy", [True, False], ids=["numpy", "data"])
@pytest.mark.parametrize(
    "pair",
    [lambda a, b: (a.q, b.q), lambda a, b: (a.q, b.k), lambda a, _: a.heads, lambda a, _: (a.q, a.inner[0])],
    ids=["two models", "two roles", "heads", "two modules"],
)
def test_a_layer_that_has_not_seen_the_input_sees_what_was_written(
    pair: Callable[..., tuple[nn.Module, nn.Module]], numpy: bool, recipe: str
) -> None:
    models = [Attention().requires_grad_(False) for _ in range(2)]
    for model in models:
        quantize_(model, recipe)
    first, second = pair(*models)
    buffer = np.random.default_rng(0).standard_normal((3, 64), np.float32)
    x = torch.from_numpy(buffer) if numpy else torch.tensor(buffer)
    with torch.no_grad():
        for layer in (first, second):
            layer(x)
        first(x)
        to_zero(x, buffer if numpy else None)
        assert torch.equal(second(x), second(torch.zeros(3, 64)))


@pytest.mark.usefixtures("library")
def test_layers_of_one_module_encode_their_input_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Attention().requires_grad_(False), torch.randn(3, 64)
    quantize_(model, "int8")
    with torch.no_grad():
        want = [model.q(x.clone()), model.k(x.clone())]
        calls: list[int] = []
        values = codec.quantize
        monkeypatch.setattr(codec, "quantize", lambda *a, **o: calls.append(1) or values(*a, **o))
        for of in (model, torch.nn.Sequential(model)):
            calls.clear()
            assert all(torch.equal(y, w) for y, w in zip(of(x), want, strict=True)) and len(calls) == 1
