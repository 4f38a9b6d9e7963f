"""Layers that read one input share its encoding: one storage, the same bits, and never the codes of another input."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from aoquant import QATConfig, quantize_
from aoquant.formats import Operand, get_operand
from aoquant.layers import cache
from aoquant.ops import router
from aoquant.recipes import get_recipe

BF16, ROWS, K, N = torch.bfloat16, 32, 128, 48
RECIPES = ["nvfp4", "mxfp8", "int8-int4", "int8", "torchao-fp8", "torchao-int8-int4"]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    others = set(cache._inputs)  # of tests before, which may still hold their tensors
    yield
    gc.collect()
    assert set(cache._inputs) <= others


class Three(nn.Module):
    """q, k and v."""

    def __init__(self, recipe: str, bias: bool = True) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(K, N, bias=bias, dtype=BF16) for _ in range(3))
        quantize_(self, QATConfig(get_recipe(recipe).make()))

    def forward(self, x: Tensor, between: Callable[[Tensor], Any] = lambda x: None) -> Tensor:
        q = self.q(x)
        between(x)
        return torch.cat((q, self.k(x), self.v(x)), -1)


class Encodings:
    """How often an input (not a weight) is encoded, by eager and by compiled code."""

    def __init__(self) -> None:
        self.count = 0
        (self.backend,) = [b for b in router._backends if (b.role, b.name) == ("quantize", "reference")]
        self.encode = self.backend.run

    def __enter__(self) -> Encodings:
        def counting(operand: Operand, x: Tensor, *rest: Any) -> Any:
            self.count += x.shape[0] != N
            return self.encode(operand, x, *rest)

        object.__setattr__(self.backend, "run", counting)
        return self

    def __exit__(self, *error: object) -> None:
        object.__setattr__(self.backend, "run", self.encode)


def inner(shape: tuple[int, ...] = (ROWS, K), dtype: torch.dtype = BF16) -> Tensor:
    """No leaf, as in a model."""
    return torch.randn(shape, dtype=dtype).requires_grad_() * 1


def apart(model: Three, x: Tensor) -> Tensor:
    """What the model gives when every layer has an input of its own."""
    return torch.cat([layer(x.clone()) for layer in (model.q, model.k, model.v)], -1)


def encodings(run: Callable[[], Tensor]) -> tuple[Tensor, int]:
    with Encodings() as mode:
        y = run()
    return y, mode.count


@pytest.mark.parametrize("shape", [(ROWS, K), (4, ROWS, K), (K,)])
@pytest.mark.parametrize("recipe", RECIPES)
def test_one_encoding_and_the_same_bits(recipe: str, shape: tuple[int, ...]) -> None:
    model, x = Three(recipe), torch.randn(shape, dtype=BF16)
    grads = []
    for run, count in ((model, 1), (lambda t: apart(model, t), 3)):
        leaf = x.clone().requires_grad_()
        y, found = encodings(lambda run=run, leaf=leaf: run(leaf * 1))  # type: ignore[misc]
        assert found == count
        model.zero_grad()
        (y * torch.arange(y.shape[-1])).sum().backward()
        grads.append([y.detach(), leaf.grad, *(p.grad for p in model.parameters())])
    for shared, alone in zip(*grads, strict=True):
        assert shared is not None and alone is not None and torch.equal(shared, alone)


def saved_bytes(run: Callable[[Tensor], Tensor], x: Tensor, own: nn.Module) -> int:
    parameters = {p.untyped_storage().data_ptr() for p in own.parameters()}
    sizes: dict[int, int] = {}
    kept = []

    def pack(t: Tensor) -> Tensor:
        kept.append(t)
        sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = run(x)
    y.float().sum().backward()
    return sum(n for at, n in sizes.items() if at not in parameters)


@pytest.mark.parametrize(
    ("recipe", "bytes_"), [("nvfp4", 0.5 + 1 / 16), ("mxfp8", 1 + 1 / 32), ("mxfp4", 0.5 + 1 / 32)]
)
def test_three_layers_keep_one_encoding(recipe: str, bytes_: float) -> None:
    model = Three(recipe)
    outer = 4 * ROWS if recipe == "nvfp4" else 0  # a scale for each token
    assert saved_bytes(model, inner(), model) <= bytes_ * ROWS * K + outer
    assert saved_bytes(lambda x: apart(model, x), inner(), model) > 2.9 * bytes_ * ROWS * K


@pytest.mark.parametrize("recipe", [pytest.param("nvfp4", marks=pytest.mark.slow), "int8-int4"])
def test_compiled_encodes_once_too(recipe: str) -> None:
    model, x = Three(recipe, bias=False), inner()
    y = model(x)
    torch._dynamo.reset()
    run = torch.compile(model, fullgraph=True)
    assert torch.equal(run(x), y)
    assert encodings(lambda: run(x))[1] == 1
    torch._dynamo.reset()


def _swap(x: Tensor) -> None:
    x.data = x.detach() * 2


def _numpy(x: Tensor) -> None:
    x.view(torch.int16).numpy()[:] = 0


def _no_grad(x: Tensor) -> None:
    with torch.no_grad():
        x.mul_(-2)


CHANGES: dict[str, Callable[[Tensor], Any]] = {
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


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_input_is_encoded_again(change: str) -> None:
    """Between the first layer and the second."""
    model = Three("nvfp4")
    x = torch.randn(ROWS, K, dtype=BF16)
    with Encodings() as mode:
        y = model(x, CHANGES[change])
    assert mode.count == 2
    changed = x.detach().clone()  # what the second and the third were given
    assert torch.equal(y[:, N:], apart(model, changed)[:, N:])


@pytest.mark.parametrize("write", [lambda x: x.data.zero_(), _numpy], ids=["data", "numpy"])
def test_what_autograd_cannot_see(write: Callable[[Tensor], Any]) -> None:
    """Such a write spoils gradients while x is kept for backward, in any program; before and after that it is seen
    here.
    """
    model, x = Three("nvfp4"), torch.randn(ROWS, K, dtype=BF16)
    kept = model.q(x)
    write(x)
    y = model(x)  # q comes by again, so everything is encoded anew
    assert torch.equal(y, apart(model, x))
    kept.sum().backward()
    y.sum().backward()  # nothing is kept any more
    x.data.normal_()
    assert torch.equal(model.k(x), model.k(x.clone()))


def test_a_frozen_layer_and_no_grad_share_nothing() -> None:
    model, x = Three("nvfp4"), torch.randn(ROWS, K, dtype=BF16)
    with torch.no_grad():
        y, found = encodings(lambda: model(x))
    assert found == 3
    with torch.inference_mode():
        assert torch.equal(model(x), y)
    model.requires_grad_(False)
    again, found = encodings(lambda: model(x.clone().requires_grad_()))
    assert found == 3 and torch.equal(again, y)


def test_formats_and_dtypes_do_not_mix() -> None:
    model = Three("nvfp4")
    other = nn.Linear(K, N, dtype=BF16)
    quantize_(other, QATConfig(get_recipe("mxfp8").make()))
    x = inner()
    (y, z), found = encodings(lambda: (model.q(x), other(x)))  # type: ignore[arg-type,return-value]
    assert found == 2
    assert torch.equal(y, model.q(x.clone())) and torch.equal(z, other(x.clone()))


def test_views() -> None:
    """Equal views of one tensor are one input, others are not."""
    model, x = Three("nvfp4"), inner((2, ROWS, K))
    halves = lambda: [layer(x[i]) for layer, i in ((model.q, 0), (model.k, 0), (model.v, 1))]  # noqa: E731
    ys, found = encodings(halves)  # type: ignore[arg-type]
    assert found == 2
    for y, layer, i in zip(ys, (model.q, model.k, model.v), (0, 0, 1), strict=True):
        assert torch.equal(y, layer(x[i].clone()))
    wide = inner((K, ROWS))
    y, found = encodings(lambda: model(wide.t()))
    assert found == 1 and torch.equal(y, apart(model, wide.t().contiguous()))


def test_a_square_and_its_transpose_are_two_inputs() -> None:
    """One address, one shape, other strides."""
    model, x = Three("nvfp4"), inner((K, K))
    (y, z), found = encodings(lambda: (model.q(x), model.k(x.t())))  # type: ignore[arg-type,return-value]
    assert found == 2
    assert torch.equal(y, model.q(x.clone())) and torch.equal(z, model.k(x.t().contiguous()))


def test_under_autocast() -> None:
    """Each layer casts for itself, and what it casts is one tensor."""
    model, x = Three("nvfp4").float(), inner(dtype=torch.float32)
    with torch.autocast("cpu", dtype=BF16):
        y, found = encodings(lambda: model(x))
        assert found == 1 and y.dtype == BF16
        assert torch.equal(y, apart(model, x))
    assert model(x).dtype == torch.float32


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not-reentrant"])
def test_under_checkpointing(reentrant: bool) -> None:
    """The recomputed forward shares like any other; the first one keeps nothing, so it has nothing to share."""
    grads = []
    model = Three("nvfp4")
    x = torch.randn(ROWS, K, dtype=BF16)
    for run in (model, lambda t: checkpoint(model, t, use_reentrant=reentrant)):
        leaf = x.clone().requires_grad_()
        model.zero_grad()
        y = run(leaf * 1)
        with Encodings() as mode:
            y.sum().backward()
        grads.append([y.detach(), leaf.grad, *(p.grad for p in model.parameters())])
    assert mode.count == 1
    for plain, recomputed in zip(*grads, strict=True):
        assert plain is not None and recomputed is not None and torch.equal(plain, recomputed)


def test_saved_elsewhere() -> None:
    """Hooks that move what is saved leave nothing to share, and nothing wrong."""
    model, x = Three("nvfp4"), inner()
    want = model(x)
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda t: t.numpy(force=True) if t.dtype == torch.int8 else t.clone(), lambda t: t
    )
    with hooks:
        y, found = encodings(lambda: model(x))
    assert found == 3 and torch.equal(y, want)


def test_encodings_die_with_what_autograd_keeps() -> None:
    model, x = Three("nvfp4"), torch.randn(ROWS, K, dtype=BF16)
    y = model(x)
    shared = cache.codes_of_input(x, (BF16, get_operand("nvfp4-row")))
    assert shared is not None and shared.take(0) is not None
    del y
    shared = cache.codes_of_input(x, (BF16, get_operand("nvfp4-row")))
    assert shared is not None and shared.take(1) is None


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
    block, x = Block(d, hidden).bfloat16(), inner((2, ROWS, d))
    plain = saved_bytes(block, x, block)
    quantize_(block, QATConfig(get_recipe(recipe).make()))
    found = saved_bytes(block, inner((2, ROWS, d)), block)
    want = plain - 2 * ROWS * ((2 * d + hidden) * (2 - bytes_) - d * bytes_)
    outer = 4 * 2 * ROWS if recipe == "nvfp4" else 0  # a scale for each token
    assert want <= found <= want + 4 * outer
