"""Layers without gradients that read one input: what they share of its encoding, and when they do not."""

from __future__ import annotations

import gc
import threading
import weakref

import torch
from torch import Tensor

from aoquant.layers.shared_operands import shared


class Encoder:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor, layer: int, how: str = "nvfp4") -> Tensor:
        def encode() -> Tensor:
            self.calls += 1
            return x.clone()

        made = shared(x, (how, torch.float32), layer, encode)
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
