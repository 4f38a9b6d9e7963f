"""The embedding: a quantised matrix of which rows are read, and no GEMM.

    y[t] = W^[ids[t]],    W^ = decode(encode(W)) in W's dtype

If a row has scales of its own (per row, per group, blocks along K), only the rows that a batch asks for are encoded. If
not, as with an outer scale of the whole matrix, all of it is encoded. A packed weight gathers the codes of these rows
and decodes them. There is no activation to quantise.

The gradient passes straight through the rounding, so it is nn.Embedding's own: rows scattered into the weight, dense or
sparse, none for padding_idx, divided by frequency if asked for. Backward saves the indices. K is the
width of a row here and of the output head's row too, so a weight that both share has one encoding.

A subclass whose forward gets its rows from `super().forward(ids)`, and scales, shifts or norms them, is quantised too
(Gemma's and BART's embeddings): its prepared class puts `QATEmbedding` behind it, and its converted form is its own
class over packed rows. `why_not_rows` reads the source of such a forward, and refuses any other.
"""

import ast
import functools
import inspect
import textwrap
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from aoquant import ops
from aoquant.distributed.sharded_linear import is_sharded
from aoquant.formats import Encoded, get_operand
from aoquant.linear.checks import check_device, note_run, refuse_second_derivative, refuse_transforms, unread
from aoquant.linear.prepared import QATLayer


class QATEmbedding(QATLayer, nn.Embedding):
    """nn.Embedding whose rows are those of the converted layer."""

    plain = nn.Embedding

    def forward(self, input: Tensor) -> Tensor:
        if not self.fake_quant:
            return super().forward(input)
        refuse_transforms()
        recipe = self.prepared.recipe
        if is_sharded(input, self.weight):
            raise ValueError(
                f"{self.prepared.fqn or 'embedding'}: embeddings under tensor parallelism are not supported: leave it out of prepare"
            )
        check_device(input, self.weight)
        options = self.padding_idx, self.scale_grad_by_freq, self.sparse, recipe.straight_through == "clipped"
        return _applied(input, self.weight, recipe.fprop_weight.name, *options)


@functools.cache
def prepared_class(plain: type[nn.Embedding]) -> type[QATEmbedding]:
    """Return the prepared class of a subclass of nn.Embedding: `super().forward(ids)` in it is QATEmbedding's."""
    return type(f"QAT{plain.__name__}", (plain, QATEmbedding), {"plain": plain, "__reduce_ex__": _reduced})


def _reduced(layer: QATEmbedding, protocol: Any) -> tuple[Any, ...]:
    """Copy and pickle by the plain class, which a module holds under its name."""
    return _blank, (layer.plain,), vars(layer).copy()


def _blank(plain: type[nn.Embedding]) -> QATEmbedding:
    cls = prepared_class(plain)  # type: ignore[arg-type]  # mypy: a class is hashable
    return cls.__new__(cls)


_FACTS = ("dtype", "device", "shape", "size", "dim", "ndim", "numel")  # a packed weight has the same
_WEIGHT = ("weight", "_parameters", "parameters", "named_parameters", "state_dict", "__dict__")


@functools.cache
def why_not_rows(cls: type[nn.Embedding]) -> str | None:
    """Return why the forward of a subclass of nn.Embedding cannot be given quantised rows; None where it can.

    It can where it takes its rows from `super().forward`, and reads nothing of the weight but its dtype, device and
    shape: in forward, and in the functions of the class that forward mentions.
    """
    functions: dict[str, FunctionType] = {}
    for base in reversed(cls.__mro__[: cls.__mro__.index(nn.Embedding)]):
        own = {name: getattr(f, "__func__", f) for name, f in vars(base).items()}
        functions |= {name: inspect.unwrap(f) for name, f in own.items() if isinstance(f, FunctionType)}
    if "forward" not in functions:
        return None
    asked, calls = ["forward"], False
    for name in asked:  # grows
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(functions[name])))
        except (OSError, SyntaxError, TypeError):
            return f"{cls.__name__}.{name} has no source to read, so it may compute something else than nn.Embedding"
        above = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and node.value in _WEIGHT:
                return f"{cls.__name__}.{name} reads {node.value!r} by its name"
            if not isinstance(node, ast.Attribute):
                continue
            if node.attr in functions and node.attr not in asked:
                asked.append(node.attr)
            if node.attr == "forward" and _is_super(node.value):
                calls = True
            elif node.attr == "forward" or (node.attr in _WEIGHT and getattr(above[node], "attr", "") not in _FACTS):
                place: ast.AST = node
                while not isinstance(place, ast.stmt):
                    place = above[place]
                return f"{cls.__name__}.{name} reads the weight past super().forward: {ast.unparse(place)[:100]}"
    return None if calls else f"{cls.__name__}.forward does not call super().forward"


def _is_super(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"


@torch.compiler.allow_in_graph
def _applied(ids: Tensor, w: Tensor, *rest: Any) -> Tensor:
    """`_QuantizedEmbedding`, taken by a compiler as one call: see `function._applied`."""
    if unread:
        note_run(w)
    return _QuantizedEmbedding.apply(ids, w, *rest)  # type: ignore[no-untyped-call]


@torch.compiler.allow_in_graph
def looked_up(ids: Tensor, w: Encoded, operand: str, dtype: torch.dtype) -> Tensor:
    """Rows `ids` of a packed weight, (*ids.shape, K) in `dtype`."""
    return ops.embedding(ids, w, get_operand(operand), dtype)


class _QuantizedEmbedding(torch.autograd.Function):
    """Rows of the fake-quantised weight; backward is nn.Embedding's."""

    @staticmethod
    def forward(
        ctx: Any,
        ids: Tensor,
        w: Tensor,
        operand: str,
        padding: int | None,
        by_frequency: bool,
        sparse: bool,
        clip: bool,
    ) -> Tensor:
        if ctx.needs_input_grad[1]:
            ctx.save_for_backward(ids, *([w] if clip else []))
        ctx.rows, ctx.operand, ctx.sparse = w.shape[0], operand, sparse
        ctx.options = -1 if padding is None else padding, by_frequency
        return ops.embedding(ids, w, get_operand(operand), w.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        ids, *w = ctx.saved_tensors
        if w:
            bits = ops.saturated(w[0], get_operand(ctx.operand), ids=ids.reshape(-1))
            grad = ops.masked(grad.reshape(-1, grad.shape[-1]), bits).view_as(grad)
        if ctx.sparse:
            dw = torch.ops.aten.embedding_sparse_backward(grad, ids, ctx.rows, *ctx.options)
        else:
            dw = ops.embedding_grad(grad, ids, ctx.rows, *ctx.options)
        return None, dw, None, None, None, None, None
