"""What a compiled training step consists of: the ops of an eager one, each once, and nothing between them.

The ops are opaque, so a compiled step can cost more than an eager one in two ways only: more ops, or copies around
them. Both are counted in the graphs that PyTorch hands to its compiler, after the partitioner has chosen what to save.
A GPU's graph differs from a CPU's, because there codes and values come of one pass; `gpu` asks for that one, on any
machine.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from support.linear_cases import BF16, BY_NAME, counting, data, layer, prepared
from support.training_cases import assert_same, step
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

from aoquant import quantize_
from aoquant.linear import function
from aoquant.linear.prepared import RANDOM
from aoquant.recipes import get_recipe

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

OPS = ("encode", "matmul", "gradients", "bgrad", "pull_back")
CASES = ["nvfp4-act", "nvfp4-h16", "mxfp8-act", "int4-int8act", "int4-g32", "fp8-row-act"]
STEP = Counter({"slice": 1, "add": 1, "slice_scatter": 1, "copy_": 1})  # the state's last number, in place
VIEWS = {"t", "permute", "view", "_unsafe_view", "alias", "detach"}  # of an input or of the result: no kernel runs
either = pytest.mark.parametrize("gpu", [False, True], ids=["cpu", "gpu"])


class Graphs:
    """A backend for torch.compile that keeps the graphs of forward and backward, and runs them as they are."""

    def __init__(self) -> None:
        self.made: list[GraphModule] = []
        self.backend = aot_autograd(
            fw_compiler=self._keep, bw_compiler=self._keep, partition_fn=min_cut_rematerialization_partition
        )

    def _keep(self, graph: GraphModule, inputs: Any) -> Any:
        self.made.append(graph)
        return make_boxed_func(graph.forward)

    def kernels(self, *of: GraphModule) -> Counter[str]:
        """Names of what runs, without views and without taking an op's results apart; of all graphs, or of these."""
        nodes = (n for g in of or self.made for n in g.graph.nodes if n.op == "call_function")
        names = (n.target._schema.name.partition("::")[2] for n in nodes if hasattr(n.target, "_schema"))
        return Counter(name for name in names if name not in VIEWS)


@either
@pytest.mark.parametrize("name", CASES)
def test_a_compiled_step_runs_the_ops_of_an_eager_one(name: str, gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No clone, no copy, no op twice; a GEMM in high precision, wgrad of weights alone, is the only kernel that is not
    ours.
    """
    if gpu:
        monkeypatch.setattr(function, "ONE_PASS", ("cpu",))
    case = BY_NAME[name]
    qat = prepared(case, layer(case, BF16))
    x, g = data("normal", 6, case.k, BF16, 1), data("normal", 6, case.n, BF16, 2)
    with counting(*OPS) as calls:
        eager = step(qat, x, g)
    graphs = Graphs()
    compiled = step(qat, x, g, torch.compile(qat, fullgraph=True, backend=graphs.backend))
    assert len(graphs.made) == 2
    assert_same(compiled, eager)
    want_ops = Counter({op: len(found) for op, found in calls.items() if found})
    if qat.prepared.recipe.fprop_input is None:
        want_ops["mm"] = 1
    assert graphs.kernels() == want_ops
    assert want_ops["encode"] <= (1 if gpu else 2), "W is encoded apart, where the GEMM does that in passing"


HYBRIDS = ("fp8-hybrid", "nvfp4-training", "mxfp8-nvfp4", "nvfp4-mxfp8", "mxfp8-hp", "nvfp4-hp")


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_compiled_hybrid_step_has_few_ops(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU: x, or x both ways; W with the product; both gradients. Each op costs the host as much as a launch. The
    state of the random numbers is neither cloned nor copied on the way.
    """
    monkeypatch.setattr(function, "ONE_PASS", ("cpu",))
    case = BY_NAME["mxfp8-act"]  # whose K every recipe takes
    qat = layer(case, BF16, bias=False)
    quantize_(nn.ModuleDict({"layer": qat}), get_recipe(name).prepare())
    x, g = data("normal", 6, case.k, BF16, 1), data("normal", 6, case.n, BF16, 2)
    state = qat._buffers.get(RANDOM)
    eager = step(qat, x, g)
    if state is not None:
        state[2] = 0
    graphs = Graphs()
    compiled = step(qat, x, g, torch.compile(qat, fullgraph=True, backend=graphs.backend))
    assert_same(compiled, eager)
    assert state is None or state[2] == 1
    forward, backward = (graphs.kernels(graph) for graph in graphs.made)
    assert forward == Counter(("encode", "matmul"))
    more = Counter(mm=1) if name.endswith("-hp") else Counter() if state is None else STEP
    assert backward == Counter(gradients=1) + more
