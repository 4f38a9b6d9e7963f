"""The embedding: a quantised matrix of which rows are read, and no GEMM.

    y[t] = W^[ids[t]],    W^ = decode(encode(W)) in W's dtype

If a row has scales of its own (per row, per group, blocks along K), only the rows that a batch asks for are encoded. If
not, as with an outer scale of the whole matrix, all of it is encoded. A packed weight gathers the codes of these rows
and decodes them. There is no activation to quantise.

The gradient passes straight through the rounding, so it is nn.Embedding's own: rows scattered into the weight, dense or
sparse, none for padding_idx, divided by frequency if asked for. Backward saves the indices. K is the
width of a row here and of the output head's row too, so a weight that both share has one encoding.
"""

from __future__ import annotations

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


@torch.compiler.allow_in_graph
def _applied(ids: Tensor, w: Tensor, *rest: Any) -> Tensor:
    """`_QuantizedEmbedding`, taken by a compiler as one call: see `function._applied`."""
    if unread:
        note_run(w)
    y: Tensor = _QuantizedEmbedding.apply(ids, w, *rest)  # type: ignore[no-untyped-call]
    return y


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
