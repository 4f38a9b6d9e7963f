"""Converted linear layers, compiled: the op that a graph holds, what it guards on, and the weights that it follows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.linear_cases import BF16, BY_NAME, assert_equal, data
from support.packed_cases import cases, packed, same
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from aoquant import PackedTensor, get_format

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


def test_codes_of_a_weight_keep_sizes_that_a_compiler_may_take_for_symbols() -> None:
    """The layer's own views have constant sizes; the weight's parts are a user's to compile with."""
    graphs: list[Any] = []

    def keep(graph: Any, given: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    run = torch.compile(lambda codes: codes + 1, backend=keep, dynamic=True)
    for name in ("int4-g32", "nvfp4-act"):
        codes = packed(name).weight.qdata
        for rows in (codes, codes[:8].clone()):
            assert torch.equal(run(rows), rows + 1)
    assert len(graphs) == 1


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


def test_codes_whose_rows_are_a_symbol_make_a_packed_tensor() -> None:
    """A compiler's codes are of a tensor that was checked; their number of rows has no value yet."""
    f = get_format("int4-g32")
    e = f.encode(torch.randn(24, 64, dtype=torch.bfloat16))
    mode = FakeTensorMode(shape_env=ShapeEnv())
    rows = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
    codes, scale, zero = (mode.from_tensor(t, symbolic_context=rows) for t in (e.codes, e.scale, e.zero))
    with mode:
        w = PackedTensor(codes, f.name, "", "dequantize", 64, torch.bfloat16, scale, zero)
    assert isinstance(w.shape[0], torch.SymInt) and w.shape[1] == 64
