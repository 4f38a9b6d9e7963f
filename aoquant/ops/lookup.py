"""The ops of an embedding: rows of a quantised table, and the gradient of the table."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aoquant.formats import get_format

from .define import fake, op
from .parts import from_parts


@op
def embedding(ids: Tensor, w: Sequence[Tensor], w_format: str, k: int, dtype: torch.dtype) -> Tensor:
    """Rows `ids` of W^ (*ids.shape, K) in `dtype`; w is [W] (V, K) of that dtype, encoded here, or the four parts of a packed one."""
    if not ids.numel():
        return w[0].new_empty(*ids.shape, k, dtype=dtype)
    flat, format = ids.reshape(-1), get_format(w_format)
    if len(w) == 1:
        rows = format.fake_quantize_rows(w[0], flat)
    else:
        rows = format.decode_rows(from_parts(w, k), flat, dtype)
    return rows.reshape(*ids.shape, k)


@fake(embedding)
def _(ids: Tensor, w: Sequence[Tensor], w_format: str, k: int, dtype: torch.dtype) -> Tensor:
    return w[0].new_empty(*ids.shape, k, dtype=dtype)


@op
def embedding_grad(grad: Tensor, ids: Tensor, rows: int, padding: int, by_frequency: bool) -> Tensor:
    """dW (rows, K) of a lookup, as nn.Embedding's. padding: the row that gets none, or -1. An op because compiled sums add in another order."""
    return torch.ops.aten.embedding_dense_backward(grad, ids, rows, padding, by_frequency)


@fake(embedding_grad)
def _(grad: Tensor, ids: Tensor, rows: int, padding: int, by_frequency: bool) -> Tensor:
    return grad.new_empty(rows, grad.shape[-1])
