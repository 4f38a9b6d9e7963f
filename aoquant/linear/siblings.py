"""q, k and v, or gate and up, in one launch, in compiled code.

A compiler sees each packed layer of few rows as one operator, `aoquant_native::linear`, and has no reason to join those
that read the same input. This pass of Inductor does: `aoquant_native::siblings` encodes the input once, and multiplies
weights in one launch where csrc cuts K alike for them, most often for all. Each product is what the layer alone
computes, bit for bit: it is cut and added alike.

Eager code has no such moment, since a layer is called before it is known whether another one will read its input.

The pass is installed with the first packed layer, where csrc has the operator and no other pass holds the place
(`torch._inductor.config.post_grad_custom_pre_pass`). A pass that is set later takes the place, which costs speed alone.
"""

import operator
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import fx

from aoquant.ops import linear_plan, native


@cache
def install() -> None:
    """Have Inductor join siblings from now on, where csrc can."""
    if native.why_not() is not None:
        return
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class JoinSiblings(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            join(graph)

        def uuid(self) -> Any:
            return get_hash_for_files((__file__,))

    if config.post_grad_custom_pre_pass is None:
        config.post_grad_custom_pre_pass = JoinSiblings()


def join(graph: fx.Graph) -> None:
    """Replace the calls of `linear` that read one input, and encode it alike, by one of `siblings`."""
    linear = torch.ops.aoquant_native.linear.default
    found: dict[tuple[fx.Node, int], list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target is linear and all(map(_stays, node.args[1:6])):
            x, *_, plan = node.args
            found.setdefault((x, linear_plan.encodes(plan)), []).append(node)
    for (x, _), nodes in found.items():
        if len(nodes) > 1:
            _join(graph, x, nodes)


def _stays(part: Any) -> bool:
    """Return whether a part of a weight is there, with its value, from the graph's beginning to its end."""
    if not isinstance(part, fx.Node):
        return True
    targets = [user.target for user in part.users if isinstance(user.target, torch._ops.OpOverload)]
    return part.op == "placeholder" and not any(target._schema.is_mutable for target in targets)


def _join(graph: fx.Graph, x: fx.Node, nodes: Sequence[fx.Node]) -> None:
    columns = [list(column) for column in zip(*(node.args[1:] for node in nodes), strict=True)]
    with graph.inserting_before(nodes[0]):
        made = graph.call_function(torch.ops.aoquant_native.siblings.default, (x, *columns))
        made.meta["val"] = [node.meta["val"] for node in nodes]
        ys = [graph.call_function(operator.getitem, (made, i)) for i in range(len(nodes))]
    for node, y in zip(nodes, ys, strict=True):
        y.meta.update(node.meta)
        node.replace_all_uses_with(y)
        graph.erase_node(node)
