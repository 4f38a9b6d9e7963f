"""Converted linear layers, compiled: the op that a graph holds, what it guards on, and the weights that it follows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.linear_cases import BF16, BY_NAME, assert_equal, data
from support.packed_cases import cases, dynamo_afresh, general, packed, same
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

from aoquant import backend
from aoquant.ops import native
from aoquant.ops.gemm import one_call

fresh_dynamo = pytest.fixture(dynamo_afresh, autouse=True)


@cases
@pytest.mark.parametrize("kind", ["onehot", "outlier", "zero"])
def test_compiled_equals_eager(name: str, kind: str) -> None:
    same(packed(name), data(kind, 6, BY_NAME[name].k, BF16))


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=["bf16", "f16"])
def test_compiled_code_sees_a_weight_whose_content_was_replaced(dtype: torch.dtype) -> None:
    """By swap_tensors and part by part: before an eager forward, and after one, by the fast path again."""
    module, other = packed("int4-g32"), packed("int4-g32", kind="constant")
    x = data("normal", 3, BY_NAME["int4-g32"].k, BF16)
    module.bias = None
    other.bias = None
    other.to(dtype)
    with torch.no_grad():
        compiled, theirs = torch.compile(module, backend="aot_eager"), torch.compile(other, backend="aot_eager")
        mine, new = compiled(x), theirs(x.to(dtype))
        torch.utils.swap_tensors(module.weight, other.weight)
        assert_equal(compiled(x.to(dtype)), new)
        assert_equal(theirs(x), mine)
        assert module._recipe_key is None
        assert_equal(module(x.to(dtype)), new)
        assert module._recipe_key is not None
        assert_equal(compiled(x.to(dtype)), new)
        old, w = copy.deepcopy(other.weight), module.weight
        compiled(x.to(dtype))
        w.qdata, w.zero_point = old.qdata, old.zero_point
        w.scale = old.scale
        if dtype is BF16:
            assert_equal(compiled(x), mine)
            assert_equal(module(x), mine)
            assert_equal(compiled(x), mine)


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
    """And today's op for more rows than it takes, under a forced backend, and where csrc is missing."""
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
        with backend("reference"), backend("reference", role="gemm"):  # the number of blocks is guarded on by nothing
            assert_equal(run(few), want)
        assert len(graphs) == 3
        if bias:  # the operator reads N values side by side
            for odd in (module.bias.detach().repeat_interleave(2)[::2], torch.full((1,), 3.0, dtype=BF16)):
                module.bias = nn.Parameter(odd, requires_grad=False)
                assert_equal(run(few), general(module, few))
            assert told == [number] and "aoquant.matmul.default" in graphs[-1]
            want = general(module, few)
    monkeypatch.setattr(one_call, "number", lambda *a: None)
    module.weight = module.weight
    with torch.no_grad():
        assert_equal(run(few), want)
    assert told == [number]
    library._destroy()


def test_what_a_compiler_sees_leaves_autocast_and_odd_shapes_to_the_general_path() -> None:
    module, x = packed("nvfp4-act").float(), data("normal", 3, BY_NAME["nvfp4-act"].k, torch.float32)
    with torch.no_grad():
        assert_equal(module._traced(x), general(module, x))
        with torch.autocast("cpu", BF16):
            assert module._traced(x).dtype == BF16
            assert_equal(module._traced(x), general(module, x))
        for odd in (x[0, 0], x[:, :-1]):
            with pytest.raises(ValueError, match="K = "):
                module._traced(odd)
