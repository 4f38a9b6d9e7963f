"""Ops of a linear layer: the product of its forward, and the sum that is its bias's gradient."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aoquant.formats import Encoded, Operand, Scales

from . import codec, contracts
from .call import Call
from .define import op
from .quantized import CODES, Ask


class Product(NamedTuple):
    """y (*lead, N), and what was found of a W that was encoded on the way, for backward: its codes, if they were to be
    kept; or its outer scale (1, 1), where a kernel would look for it again.
    """

    y: Tensor
    w: Encoded | None
    measured: Tensor | None


def _product(a: Any) -> Product:
    rows = a.w.codes if isinstance(a.w, Encoded) else a.w
    y = rows.new_empty(*a.lead, rows.shape[0], dtype=a.dtype)
    if isinstance(a.w, Encoded):
        return Product(y, None, None)
    if a.keep:
        return Product(y, a.w_operand.encode(a.w, a.held), None)
    measures = a.held is None and codec.finds_outer(a.w_operand)
    return Product(y, None, rows.new_empty(1, 1, dtype=torch.float32) if measures else None)


@op(_product, repeated=True)
def matmul(
    x: Tensor | Encoded,
    w: Tensor | Encoded,
    bias: Tensor | None,
    x_operand: Operand | None,
    w_operand: Operand,
    contract: str,
    lead: Sequence[int],
    dtype: torch.dtype,
    x_values: Tensor | None = None,
    strides: Sequence[int] | None = None,
    keep: bool = False,
    held: Scales | None = None,
) -> Product:
    """y (*lead, N) in `dtype` under `contract`.

    x: (*lead, K), encoded here where it has an operand; or flattened to (M, K) and encoded already. w: (N, K), encoded
        here, or encoded already.
    x_values: what the contract reads of an encoded x (`contracts.reads`), where encoding made it in passing.
    strides: of the decoded (*lead, K) input, for "dequantize" with an encoded x that was not contiguous.
    keep: whether backward reads the codes of a w that is encoded here. held: w's scales from elsewhere.
    """
    values = alpha = None
    given = w
    if isinstance(w, Tensor) and (keep or held is not None or not w.is_cuda):
        if held is not None or not w.is_cuda or w.dtype is not dtype or contracts.reads(contract) == "codes":
            made = codec.quantize(w_operand, w, CODES if held is None else Ask(held=held))
        else:  # its operand in the same pass, and what the accumulator is multiplied by
            made = codec.quantize(w_operand, w, Ask(True, dtype, contracts.reads(contract) == "operand"))
        assert made.encoded is not None
        w, values, alpha = made.encoded, made.values, made.alpha if made.values is not None else None
    call = Call(contract, x, x_operand, w, w_operand, bias, lead, dtype, strides, x_values, values, None, alpha)
    if 0 in lead:
        y = call.w_rows.new_empty(*lead, call.w_rows.shape[0], dtype=dtype)
    else:
        y = call.run()
        if y._is_view():  # autograd: `relu_` of a Function's view is an error
            y = torch.ops.aten._unsafe_view(y, y.shape)
    if isinstance(given, Encoded) or keep:
        return Product(y, call.w if given is not w else None, None)
    measures = held is None and codec.finds_outer(w_operand)
    return Product(y, None, call.alpha_w if measures else None)


@op(lambda a: a.grad_MN.new_empty(a.grad_MN.shape[1], dtype=a.dtype))
def bgrad(grad_MN: Tensor, dtype: torch.dtype) -> Tensor:
    """db (N,) in `dtype`, summed in float32. An op because compiled sums add in another order."""
    return grad_MN.sum(0, dtype=torch.float32).to(dtype)
