"""Converted linear layers, compiled: the op that a graph holds, what it guards on, and the weights that it follows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.linear_cases import BF16, BY_NAME, assert_equal, data
from support.packed_cases import cases, general, packed, same
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

from aoquant import backend
from aoquant.ops import native
from aoquant.ops.gemm import one_call

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@cases
@pytest.mark.parametrize("kind", ["onehot", "outlier", "zero"])
def test_compiled_equals_eager(name: str, kind: str) -> None:
    same(packed(name), data(kind, 6, BY_NAME[name].k, BF16))


@pytest.mark.parametrize("name", ["int4-g32", "nvfp4-act"])
def test_blocks_share_one_graph(name: str) -> None:
    case = BY_NAME[name]
    blocks = [nn.Sequential(packed(name), nn.ReLU()) for _ in range(3)]
    x = data("normal", 3, case.k, BF16)
    for block in blocks:
        block.compile(backend="eager", fullgraph=True)
    with torch.no_grad():
        for block in blocks:
            assert_equal(block(x), block[1](block[0](x)))
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


def test_a_layer_compiled_after_another_format_has_no_symbols() -> None:
    """Dynamo takes a size that differs between two compilations of the same code for a dynamic one."""
    inputs: list[list[Any]] = []

    def keep(graph: Any, given: list[Any]) -> Any:
        inputs.append(given)
        return graph.forward

    with torch.no_grad():
        for name in ("int4-g32", "nvfp4-dynamic", "mxfp8-act"):
            module, x = packed(name), data("normal", 3, BY_NAME[name].k, BF16)
            assert_equal(torch.compile(module, backend=keep, fullgraph=True)(x), module(x))
    assert len(inputs) == 3 and all(type(i) is Tensor or isinstance(i, nn.Parameter) for given in inputs for i in given)


def test_a_compiled_step_has_one_op_and_guards_on_no_subclass() -> None:
    from torch._dynamo.backends.common import aot_autograd

    module, x = packed("int4-g32"), data("normal", 3, BY_NAME["int4-g32"].k, BF16)
    graphs: list[Any] = []
    guards: list[Any] = []

    def keep(graph: Any, given: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def all_of(found: Any) -> list[bool]:
        guards.extend(found)
        return [True] * len(found)

    with torch.no_grad():
        run = torch.compile(
            module, fullgraph=True, backend=aot_autograd(fw_compiler=keep, inference_compiler=keep),
            options={"guard_filter_fn": all_of},
        )  # fmt: skip
        assert_equal(run(x), module(x))
    ops = [str(n.target) for n in graphs[0].graph.nodes if n.op == "call_function" and "aoquant" in str(n.target)]
    assert ops == ["aoquant.matmul.default"]
    assert not [g.name for g in guards if "weight" in g.name]


@pytest.mark.parametrize(
    ("name", "number", "parts"),
    [
        ("int4-g32", 5 << 8 | 1 << 17, (True, False)),  # groups of 32, zeros
        ("nvfp4-dynamic", 1 | 4 << 8 | 1 << 18, (False, True)),  # groups of 16, alpha_w
    ],
)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_a_compiler_sees_one_operator_where_csrc_has_it(
    bias: bool, name: str, number: int, parts: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the general op for more rows than it takes, and under a forced backend."""
    from torch._dynamo.backends.common import aot_autograd

    module, case = packed(name, bias), BY_NAME[name]
    library = torch.library.Library("aoquant_native", "FRAGMENT")
    library.define(
        "linear(Tensor x, Tensor codes, Tensor scale, Tensor? zero, Tensor? alpha_w, Tensor? bias, int plan) -> Tensor"
    )
    told: list[int] = []

    def linear(x: Tensor, codes: Tensor, scale: Tensor, zero: Any, alpha: Any, bias: Any, plan: int) -> Tensor:
        told.append(plan)
        assert codes.data_ptr() == module.weight.qdata.data_ptr() and (zero is not None, alpha is not None) == parts
        with backend("reference"):
            return F.linear(x, module.weight, bias)

    library.impl("linear", linear, "CPU")
    torch.library.register_fake("aoquant_native::linear", native._linear, lib=library)
    monkeypatch.setattr(one_call, "number", lambda *a: number if a[-1] <= 256 else None)
    module.weight = module.weight  # what it remembers of its weight is made anew
    graphs: list[list[str]] = []

    def keep(graph: Any, given: Any) -> Any:
        graphs.append([str(n.target) for n in graph.graph.nodes if n.op == "call_function"])
        return graph.forward

    compiler = aot_autograd(fw_compiler=keep, inference_compiler=keep)
    with torch.no_grad():
        run = torch.compile(module, fullgraph=True, backend=compiler, dynamic=False)
        few, many = data("normal", 3, case.k, BF16).view(1, 3, -1), data("normal", 257, case.k, BF16)
        want = general(module, few)
        assert_equal(run(few), want)
        assert graphs == [["aoquant_native.linear.default"]] and told == [number]
        assert_equal(run(many), general(module, many))
        assert "aoquant_native.linear.default" not in graphs[-1] and len(graphs) == 2
        with backend("reference"):
            assert_equal(run(few), want)
        assert "aoquant.matmul.default" in graphs[-1] and told == [number] and len(graphs) == 3
    library._destroy()
