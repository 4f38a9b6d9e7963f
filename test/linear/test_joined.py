"""Packed layers that read one input become one operator in a compiled graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from aoquant.linear import siblings
from aoquant.ops import native

PLAIN, ENCODED = 1 | 4 << 8, 1 | 1 << 4 | 4 << 8  # plans: x as it is, and encoded by rows
WEIGHT = "Tensor{0} codes, Tensor{0} scale, Tensor?{0} zero, Tensor?{0} alpha_w, Tensor?{0} bias"


def call(x: Tensor, w: Tensor, plan: int = PLAIN, bias: Tensor | None = None) -> Tensor:
    y: Tensor = torch.ops.aoquant_native.linear(x, w, w, None, None, bias, plan)
    return y


def attention(x: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    a = call(x, q) + call(x, k, bias=bias)
    return call(a * call(x, v), v)


def written(x: Tensor, a: Tensor, b: Tensor, *rest: Tensor) -> Tensor:
    y = call(x, a)
    b.add_(1)
    return y + call(x, b)


# a graph, and the operators that the pass makes of it
GRAPHS: dict[str, tuple[Callable[..., Tensor], list[str]]] = {
    "layers of one input": (attention, ["siblings", "linear"]),
    "one encoded input": (lambda x, a, b, *rest: call(x, a, ENCODED) * call(x, b, ENCODED), ["siblings"]),
    "encoded otherwise": (lambda x, a, b, *rest: call(x, a, ENCODED) + call(x, b), ["linear", "linear"]),
    "a weight that the graph makes": (lambda x, a, b, *rest: call(x, a) + call(x, b + 1), ["linear", "linear"]),
    "a weight that the graph writes": (written, ["linear", "linear"]),
}


@pytest.mark.parametrize("graph", GRAPHS)
def test_what_is_joined_computes_the_same(graph: str) -> None:
    """`linear` and `siblings` of csrc are on floats here: y = x W^T + bias."""
    if native.why_not() is None:
        pytest.skip("the library is here: test/gpu has the test of its operators")
    library = torch.library.Library("aoquant_native", "FRAGMENT")
    library.define(f"linear(Tensor x, {WEIGHT.format('')}, int plan) -> Tensor")
    library.define(f"siblings(Tensor x, {WEIGHT.format('[]')}, int[] plans) -> Tensor[]")

    def linear(x: Tensor, codes: Tensor, scale: Tensor, zero: Any, alpha: Any, bias: Any, plan: int) -> Tensor:
        return nn.functional.linear(x, codes, bias)

    library.impl("linear", linear, "CPU")
    library.impl("siblings", lambda x, *parts: [linear(x, *row) for row in zip(*parts, strict=True)], "CPU")
    torch.manual_seed(0)
    given = torch.randn(3, 8), *(torch.randn(8, 8) for _ in range(3)), torch.randn(8)
    run, operators = GRAPHS[graph]
    want = run(*(t.clone() for t in given))  # `written` changes its weight
    traced = make_fx(run)(*(t.clone() for t in given))
    siblings.join(traced.graph)
    traced.graph.lint()
    traced.recompile()
    names = [str(n.target) for n in traced.graph.nodes if n.op == "call_function"]
    assert [n.split(".")[1] for n in names if n.startswith("aoquant_native")] == operators
    assert torch.equal(traced(*(t.clone() for t in given)), want)
    library._destroy()
