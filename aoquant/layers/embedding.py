"""The embedding: a quantised matrix of which rows are read, and no GEMM.

    y[t] = W^[ids[t]],    W^ = decode(encode(W)) in W's dtype

Only the rows that a batch asks for are encoded where a row's scales are its own (per row, per group, blocks along K); where they are not,
as with an outer scale of the whole matrix, all of it is encoded. A packed weight gathers codes and decodes those rows. There is no
activation to quantise.

The gradient passes straight through the rounding, so it is nn.Embedding's own: rows scattered into the weight, dense or sparse, none for
padding_idx, divided by frequency if asked for. What is saved for backward is the indices. K is the width of a row here and of the
output head's row too, so a weight that both share has one encoding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from aoquant import ops
from aoquant.layers.linear import check_device
from aoquant.layers.qat import QATLayer
from aoquant.parallel.linear import is_sharded


class QATEmbedding(QATLayer, nn.Embedding):
    """nn.Embedding whose rows are those of the converted layer."""

    plain = nn.Embedding

    def forward(self, ids: Tensor) -> Tensor:
        if not self.fake_quant:
            return super().forward(ids)
        recipe = self.prepared.recipe
        if is_sharded(ids, self.weight):
            raise ValueError(
                f"{self.prepared.fqn or 'embedding'}: embeddings under tensor parallelism are not supported: leave it out of prepare"
            )
        check_device(ids, self.weight)
        options = self.padding_idx, self.scale_grad_by_freq, self.sparse, recipe.straight_through == "clipped"
        return _QuantizedEmbedding.apply(ids, self.weight, recipe.fprop_weight.name, *options)  # type: ignore[no-untyped-call]


class _QuantizedEmbedding(torch.autograd.Function):
    """Rows of the fake-quantised weight; backward is nn.Embedding's."""

    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, w: Tensor, format: str, padding: int | None, by_frequency: bool, sparse: bool, clip: bool
    ) -> Tensor:
        if ctx.needs_input_grad[1]:
            ctx.save_for_backward(ids, *([w] if clip else []))
        ctx.rows, ctx.format, ctx.sparse = w.shape[0], format, sparse
        ctx.options = -1 if padding is None else padding, by_frequency
        return ops.embedding(ids, [w], format, w.shape[1], w.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ids, *w = ctx.saved_tensors
        if w:
            bits = ops.saturated(w[0], ctx.format, ids=ids.reshape(-1))
            grad = ops.masked(grad.reshape(-1, grad.shape[-1]), bits).view_as(grad)
        if ctx.sparse:
            dw = torch.ops.aten.embedding_sparse_backward(grad, ids, ctx.rows, *ctx.options)
        else:
            dw = ops.embedding_grad(grad, ids, ctx.rows, *ctx.options)
        return None, dw, None, None, None, None, None
