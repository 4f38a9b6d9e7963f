"""Layers that read one input, such as q, k and v, encode it once and keep it once; and never does a layer multiply the
codes of another input, or of what an input was before somebody wrote to it.
"""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.cpu_library import with_library
from support.linear_cases import BF16, assert_equal
from support.meters import encodings, keeping, nbytes, saved
from support.training_cases import assert_same, step
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from aoquant import quantize_
from aoquant.linear import function
from aoquant.recipes import get_recipe

ROWS, K, N = 32, 128, 48
library = pytest.fixture(with_library)
# encodings of an input that three layers read, and bytes that they keep for each of its values
SHARED = {
    "nvfp4": (1, 0.5 + 1 / 16 + 4 / K),
    "mxfp8": (1, 1 + 1 / 32),
    "mxfp4": (1, 0.5 + 1 / 32),
    "int8-int4": (1, 1 + 5 / K),
    "int8": (1, 1 + 4 / K),
    "torchao-fp8": (1, 1 + 4 / K),
    "torchao-int8-int4": (1, 1 + 5 / K),
    "mxfp8-nvfp4": (2, 0.57),
    "nvfp4-training": (2, 0.57),
    "fp8-hybrid": (1, 1.01),
    "mxfp8-hp": (1, 2),
    "nvfp4-hp": (1, 2),
}


class Three(nn.Module):
    """q, k and v of one input."""

    def __init__(self, recipe: str, dtype: torch.dtype = BF16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(K, N, dtype=dtype) for _ in range(3))
        quantize_(self, get_recipe(recipe).prepare())

    def forward(self, x: Tensor, between: Callable[[Tensor], Any] = lambda x: None) -> Tensor:
        q = self.q(x)
        between(x)
        return torch.cat((q, self.k(x), self.v(x)), -1)


def apart(model: Three, x: Tensor) -> Tensor:
    """What the model gives when every layer has an input of its own."""
    return torch.cat([layer(x.clone()) for layer in (model.q, model.k, model.v)], -1)


def inner(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """No leaf, as in a model."""
    return torch.randn(shape or (ROWS, K), dtype=dtype).requires_grad_() * 1


def counted(run: Callable[[], Any]) -> tuple[Any, int]:
    """What `run` returns, and how often it encoded an input of K columns."""
    with encodings() as count:
        y = run()
    return y, sum(n for shape, n in count.items() if K in shape and N not in shape)


@pytest.mark.parametrize("gpu", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize("recipe", SHARED)
def test_one_encoding_one_storage_and_the_same_bits(recipe: str, gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """For 1-D to 3-D inputs; also as on a GPU, where both sides come of one pass."""
    if gpu:
        monkeypatch.setattr(function, "ONE_PASS", ("cpu",))
    model, other, (sides, most) = Three(recipe), Three(recipe), SHARED[recipe]
    for shape in ((ROWS, K), (4, ROWS, K), (K,)):
        x, g = torch.randn(shape, dtype=BF16), torch.randn(*shape[:-1], 3 * N, dtype=BF16)
        got, found = counted(lambda x=x, g=g: step(model, x, g, lambda t: model(t * 1)))
        assert found == sides or shape == (K,)
        want, found = counted(lambda x=x, g=g: step(other, x, g, lambda t: apart(other, t * 1)))
        assert found >= 3
        if "training" not in recipe:  # whose layers draw in the order of their calls
            assert_same(got, want)
    x = inner().detach()  # else each layer keeps its weight's columns, too
    assert saved(model, model, x) <= most * ROWS * K + 16
    assert saved(model, lambda x: apart(model, x), x) > 2.7 * (most - 4 / K) * ROWS * K


@pytest.mark.parametrize("recipe", [pytest.param("nvfp4", marks=pytest.mark.slow), "int8-int4"])
def test_compiled_encodes_once_too(recipe: str) -> None:
    model, x = Three(recipe), inner()
    torch._dynamo.reset()
    run = torch.compile(model, fullgraph=True)
    assert_equal(run(x), model(x))
    assert counted(lambda: run(x))[1] == 1
    torch._dynamo.reset()


# Inputs that are written


def _swap(x: Tensor) -> None:
    x.data = x.detach() * 2


def _no_grad(x: Tensor) -> None:
    with torch.no_grad():
        x.mul_(-2)


SEEN: dict[str, Callable[[Tensor], Any]] = {
    "add_": lambda x: x.add_(1),
    "view.zero_": lambda x: x[3:].zero_(),
    "setitem": lambda x: x.__setitem__(0, 5.0),
    "copy_": lambda x: x.copy_(torch.ones_like(x)),
    "out=": lambda x: torch.mul(x, 3, out=x),
    "detach.add_": lambda x: x.detach().add_(1),
    "no_grad": _no_grad,
    "set_": lambda x: x.set_(torch.randn_like(x)),
    "data=": _swap,
    "foreach": lambda x: torch._foreach_add_([x], 1.0),
    "relu_": lambda x: torch.relu_(x),
}
UNSEEN: dict[str, Callable[[Tensor], Any]] = {  # by autograd: no version counts them
    "data.fill_": lambda x: x.data.fill_(3.0),
    "numpy": lambda x: x.view(torch.int16).numpy().__setitem__(slice(None), 0),
}


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8-nvfp4"])
@pytest.mark.parametrize("change", SEEN)
def test_an_input_that_changes_between_two_layers_is_encoded_again(change: str, recipe: str) -> None:
    model, x = Three(recipe), torch.randn(ROWS, K, dtype=BF16)
    y = model(x, SEEN[change])
    assert_equal(y[:, N:], apart(model, x.detach())[:, N:])


@pytest.mark.parametrize("change", UNSEEN)
def test_a_write_that_autograd_cannot_see_spoils_no_later_call(change: str) -> None:
    """It spoils gradients while x is kept for backward, in any program. After that, and for a layer that comes by
    again, it is seen.
    """
    model, x = Three("nvfp4"), torch.randn(ROWS, K, dtype=BF16)
    kept = model.q(x)
    UNSEEN[change](x)
    y = model(x)
    assert_equal(y, apart(model, x))
    kept.sum().backward()
    y.sum().backward()  # nothing is kept any more
    x.data.normal_()
    assert_equal(model.k(x), model.k(x.clone()))


class Attention(nn.Module):
    """Converted: q and k read one input; so do two heads of a list, and a layer of another module."""

    def __init__(self, recipe: str) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(64, 32), nn.Linear(64, 32)
        self.heads = nn.ModuleList([nn.Linear(64, 32) for _ in range(2)])
        self.inner = nn.Sequential(nn.Linear(64, 32))
        quantize_(self.requires_grad_(False), recipe)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [self.q(x), self.k(x)]


PAIRS: dict[str, Callable[..., Any]] = {
    "two models": lambda a, b: (a.q, b.q),
    "two roles": lambda a, b: (a.q, b.k),
    "heads": lambda a, b: a.heads,
    "two modules": lambda a, b: (a.q, a.inner[0]),
}


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("recipe", ["int8", "int8-int4"])
@pytest.mark.parametrize("numpy", [True, False], ids=["numpy", "data"])
@pytest.mark.parametrize("pair", PAIRS)
@torch.no_grad()
def test_a_packed_layer_sees_what_was_written(pair: str, numpy: bool, recipe: str) -> None:
    """By a write that no version counts, whichever layer read the input before."""
    first, second = PAIRS[pair](Attention(recipe), Attention(recipe))
    buffer = np.random.default_rng(0).standard_normal((3, 64), np.float32)
    x = torch.from_numpy(buffer) if numpy else torch.tensor(buffer)
    for layer in (first, second, first):
        layer(x)
    if numpy:
        buffer[:] = 0
    else:
        x.data.zero_()
    assert_equal(second(x), second(torch.zeros(3, 64)))


@pytest.mark.usefixtures("library")
@torch.no_grad()
def test_a_buffer_that_is_used_again_is_read_again() -> None:
    model, x = Attention("int8"), torch.zeros(3, 64)
    for value in range(4):
        (x.data if value % 2 else x).fill_(value)
        for y, want in zip(model(x), model(torch.full((3, 64), float(value))), strict=True):
            assert_equal(y, want)


# What is one input


def test_formats_do_not_mix() -> None:
    model, other, x = Three("nvfp4"), Three("mxfp8"), inner()
    (y, z), found = counted(lambda: (model.q(x), other.q(x)))
    assert found == 2
    assert_equal(y, model.q(x.clone()))
    assert_equal(z, other.q(x.clone()))


def test_views() -> None:
    """Equal views of one tensor are one input; others, and a square and its transpose, are not."""
    model, x = Three("nvfp4"), inner(2, ROWS, K)
    calls = [(model.q, 0), (model.k, 0), (model.v, 1)]
    ys, found = counted(lambda: [layer(x[i]) for layer, i in calls])
    assert found == 2
    for y, (layer, i) in zip(ys, calls, strict=True):
        assert_equal(y, layer(x[i].clone()))
    wide, square = inner(K, ROWS), inner(K, K)
    y, found = counted(lambda: model(wide.t()))
    assert found == 1
    assert_equal(y, apart(model, wide.t().contiguous()))
    (y, z), found = counted(lambda: (model.q(square), model.k(square.t())))
    assert found == 2
    assert_equal(y, model.q(square.clone()))
    assert_equal(z, model.k(square.t().contiguous()))


@pytest.mark.parametrize("recipe", SHARED)
def test_a_tensor_that_is_yet_to_be_negated_is_another_input(recipe: str) -> None:
    """It has the memory of the other one: the imaginary parts of a tensor and of its conjugate, say."""
    model, x = Three(recipe), inner().detach()
    same = copy.deepcopy(model.k)
    q, k, wanted = model.q(x), model.k(torch._neg_view(x)), same(x.neg())
    assert_equal(q, model.q(x.clone()))
    assert_equal(k, wanted)
    for y in (k, wanted):
        y.backward(torch.ones_like(y))
    assert_equal(model.k.weight.grad, same.weight.grad)


def test_under_autocast() -> None:
    """Each layer casts for itself, and what it casts is one tensor."""
    model, x = Three("nvfp4").float(), inner(dtype=torch.float32)
    with torch.autocast("cpu", dtype=BF16):
        y, found = counted(lambda: model(x))
        assert found == 1 and y.dtype == BF16
        assert_equal(y, apart(model, x))
    assert model(x).dtype == torch.float32


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not-reentrant"])
def test_under_checkpointing(reentrant: bool) -> None:
    """The recomputed forward shares like any other."""
    model = Three("nvfp4")
    y = checkpoint(model, inner(), use_reentrant=reentrant)
    assert counted(lambda: y.sum().backward())[1] == 1


def test_hooks_that_move_what_is_saved() -> None:
    model, x = Three("nvfp4"), inner()
    want = model(x)
    move = lambda t: t.numpy(force=True) if t.dtype == torch.int8 else t.clone()  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(move, lambda t: t):
        assert_equal(model(x), want)


def test_without_gradients() -> None:
    model, x = Three("nvfp4"), torch.randn(ROWS, K, dtype=BF16)
    want = apart(model, x)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(model(x), want)
    model.requires_grad_(False)
    assert torch.equal(model(x.clone().requires_grad_()), want)


@pytest.mark.parametrize("gradients", [True, False])
def test_codes_die_with_their_input_and_what_autograd_keeps(gradients: bool) -> None:
    model = Three("nvfp4").requires_grad_(gradients)
    x = torch.randn(ROWS, K, dtype=BF16)
    with keeping(model) as kept, torch.set_grad_enabled(gradients):
        y = model(x)
    assert (nbytes(kept) > 0) == gradients
    codes = [weakref.ref(t) for t in kept.values()]
    input_ = weakref.ref(x)
    kept.clear()
    del y, x
    gc.collect()
    assert input_() is None and not any(ref() is not None for ref in codes)


def test_threads_have_inputs_of_their_own() -> None:
    model = Three("nvfp4")
    xs = [torch.randn(ROWS, K, dtype=BF16) for _ in range(8)]
    want = [apart(model, x) for x in xs]
    got: list[Tensor | None] = [None] * len(xs)

    def work(i: int) -> None:
        for _ in range(5):
            got[i] = model(xs[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(xs))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for y, w in zip(got, want, strict=True):
        assert y is not None and torch.equal(y, w)


class Block(nn.Module):
    """A Llama block without positions: the inputs of its seven linears are four tensors."""

    def __init__(self, d: int, hidden: int) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(d), nn.RMSNorm(d)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(d, hidden, bias=False), nn.Linear(d, hidden, bias=False)
        self.down = nn.Linear(hidden, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        q, k, v = (p(h).unflatten(-1, (4, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        a = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).flatten(-2))
        h = self.second(x)
        return x + self.down(torch.nn.functional.silu(self.gate(h)) * self.up(h))


@pytest.mark.parametrize(
    ("recipe", "bytes_"), [("nvfp4", 0.5 + 1 / 16), ("mxfp4", 0.5 + 1 / 32), ("mxfp8", 1 + 1 / 32)]
)
def test_a_transformer_block_keeps_codes_in_place_of_its_linears_inputs(recipe: str, bytes_: float) -> None:
    """Three inputs shrink to codes; the fourth is kept by attention as well, as its output, so there codes come on
    top.
    """
    d, hidden = 128, 256
    block = Block(d, hidden).bfloat16()
    plain = saved(block, block, inner(2, ROWS, d))
    quantize_(block, get_recipe(recipe).prepare())
    found = saved(block, block, inner(2, ROWS, d))
    want = plain - 2 * ROWS * ((2 * d + hidden) * (2 - bytes_) - d * bytes_)
    outer = 4 * 2 * ROWS if recipe == "nvfp4" else 0  # a scale for each token
    assert want <= found <= want + 4 * outer
