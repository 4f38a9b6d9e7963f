"""Packed layers that read one input become one operator in a compiled graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from aoquant.linear import siblings
from aoquant.ops import native

PLAIN, ENCODED = 1 | 4 << 8, 1 | 1 << 4 | 4 << 8  # plans: x as it is, and encoded by rows


@pytest.fixture(autouse=True)
def operators() -> Iterator[Any]:
    """`linear` and `siblings` of csrc, on floats: y = x W^T + bias."""
    if native.why_not() is None:
        pytest.skip("the library is here: test/gpu has the test of its operators")
    library = torch.library.Library("aoquant_native", "FRAGMENT")
    library.define(
        "linear(Tensor x, Tensor codes, Tensor scale, Tensor? zero, Tensor? alpha_w, Tensor? bias, int plan) -> Tensor"
    )
    library.define(
        "siblings(Tensor x, Tensor[] codes, Tensor[] scale, Tensor?[] zero, Tensor?[] alpha_w, Tensor?[] bias, int[] plans) -> Tensor[]"
    )

    def linear(x: Tensor, codes: Tensor, scale: Tensor, zero: Any, alpha: Any, bias: Any, plan: int) -> Tensor:
        return nn.functional.linear(x, codes, bias)

    def several(x: Tensor, *columns: Any) -> list[Tensor]:
        return [linear(x, *row) for row in zip(*columns, strict=True)]

    library.impl("linear", linear, "CPU")
    library.impl("siblings", several, "CPU")
    yield library
    library._destroy()


def call(x: Tensor, w: Tensor, plan: int = PLAIN, bias: Tensor | None = None) -> Tensor:
    y: Tensor = torch.ops.aoquant_native.linear(x, w, w, None, None, bias, plan)
    return y


def joined(f: Any, *given: Tensor) -> tuple[list[str], Any]:
    """The operators of f's graph behind the pass, and the graph's results."""
    traced = make_fx(f)(*(t.clone() for t in given))  # f may write to them
    siblings.join(traced.graph)
    traced.graph.lint()
    traced.recompile()
    names = [str(n.target) for n in traced.graph.nodes if n.op == "call_function"]
    return [n.split(".")[1] for n in names if n.startswith("aoquant_native")], traced(*given)


def weights(*rows: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(n, 8) for n in rows]


def test_layers_of_one_input_are_one_operator() -> None:
    def block(x: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, bias: Tensor) -> Tensor:
        a = call(x, q) + call(x, k, bias=bias)
        return call(a * call(x, v), o)

    given = torch.randn(3, 8), *weights(8, 8, 8, 4), torch.randn(8)
    names, y = joined(block, *given)
    assert names == ["siblings", "linear"]
    assert torch.equal(y, block(*given))


def test_an_input_is_encoded_once_for_all() -> None:
    def block(x: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.cat((call(x, q, ENCODED), call(x, k, ENCODED)), -1)

    given = torch.randn(3, 8), *weights(8, 4)
    names, y = joined(block, *given)
    assert names == ["siblings"] and torch.equal(y, block(*given))


def test_inputs_that_are_encoded_otherwise_stay_apart() -> None:
    def block(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return call(x, a, ENCODED) + call(x, b, PLAIN)

    given = torch.randn(3, 8), *weights(4, 4)
    names, y = joined(block, *given)
    assert names == ["linear", "linear"] and torch.equal(y, block(*given))


def test_a_weight_that_the_graph_makes_or_writes_stays_apart() -> None:
    def made(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return call(x, a) + call(x, b + 1)

    def written(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        y = call(x, a)
        b.add_(1)
        return y + call(x, b)

    for f in (made, written):
        x, a, b = torch.randn(3, 8), *weights(4, 4)
        want = f(x, a.clone(), b.clone())
        names, y = joined(f, x, a.clone(), b.clone())
        assert names == ["linear", "linear"] and torch.equal(y, want)
