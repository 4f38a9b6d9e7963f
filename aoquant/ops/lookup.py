"""The ops of an embedding: rows of a quantised table, and the gradient of the table."""

import torch
from torch import Tensor

from aoquant.formats import Encoded, Operand

from .define import op


@op(lambda a: a.ids.new_empty(*a.ids.shape, a.w.k if isinstance(a.w, Encoded) else a.w.shape[1], dtype=a.dtype))
def embedding(ids: Tensor, w: Tensor | Encoded, w_operand: Operand, dtype: torch.dtype) -> Tensor:
    """Rows `ids` of W^ (*ids.shape, K) in `dtype`; w is (V, K) of that dtype, encoded here, or encoded already."""
    format = w_operand.format
    k = w.k if isinstance(w, Encoded) else w.shape[1]
    if not ids.numel():
        return ids.new_empty(*ids.shape, k, dtype=dtype)
    flat = ids.reshape(-1)
    rows = format.decode_rows(w, flat, dtype) if isinstance(w, Encoded) else format.fake_quantize_rows(w, flat)
    return rows.reshape(*ids.shape, k)


@op(lambda a: a.grad.new_empty(a.rows, a.grad.shape[-1]))
def embedding_grad(grad: Tensor, ids: Tensor, rows: int, padding: int, by_frequency: bool) -> Tensor:
    """dW (rows, K) of a lookup, as nn.Embedding's. padding: the row that gets none, or -1. An op because compiled sums
    add in another order.
    """
    return torch.ops.aten.embedding_dense_backward(grad, ids, rows, padding, by_frequency)
