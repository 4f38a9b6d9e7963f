"""Ops of a linear layer: its three GEMMs, and the sum that is its bias's gradient.

`dgrad` encodes the weight again, so that a compiled backward has nothing to keep of it but the parameter itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aoquant.formats import Encoded, Operand, Scales
from aoquant.formats.random import DGRAD_GRAD_OUTPUT, WGRAD_GRAD_OUTPUT

from . import backward, codec, contracts
from .backward import Kept, Pair
from .call import Call
from .define import op
from .encoding import encode
from .router import CodesAndValues


class Product(NamedTuple):
    """y (*lead, N), and the outer scale (1, 1) of a W that was encoded on the way, where `codec.finds_outer`: backward
    can use it again.
    """

    y: Tensor
    measured: Tensor | None


def _product(a: Any) -> Product:
    rows = a.w.codes if isinstance(a.w, Encoded) else a.w
    found = isinstance(a.w, Tensor) and codec.finds_outer(a.w_operand)
    return Product(
        rows.new_empty(*a.lead, rows.shape[0], dtype=a.dtype),
        rows.new_empty(1, 1, dtype=torch.float32) if found else None,
    )


@op(_product)
def scaled_mm(
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
) -> Product:
    """y (*lead, N) in `dtype` under `contract`.

    x: (*lead, K) without x_operand, else encoded after being flattened to (M, K). w: (N, K), encoded here, or encoded
        already.
    x_values: what the contract reads of an encoded x (`contracts.reads`), where encoding made it in passing.
    strides: of the decoded (*lead, K) input, for "dequantize" with an encoded x that was not contiguous.
    """
    call = Call(contract, x, x_operand, w, w_operand, bias, lead, dtype, strides, x_values)
    y = _multiplied(call)
    found = isinstance(w, Tensor) and codec.finds_outer(w_operand)
    return Product(y, call.alpha_w if found else None)


def _multiplied(call: Call) -> Tensor:
    """y, no view, for autograd: `relu_` of a Function's view is an error."""
    if 0 in call.lead:
        return call.w_rows.new_empty(*call.lead, call.w_rows.shape[0], dtype=call.dtype)
    y = call.run()
    return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y


class ProductAndCodes(NamedTuple):
    """y (*lead, N), and W as it was encoded on the way."""

    y: Tensor
    w: Encoded


def _product_and_codes(a: Any) -> ProductAndCodes:
    y = a.w.new_empty(*a.lead, a.w.shape[0], dtype=a.dtype)
    return ProductAndCodes(y, a.w_operand.encode(a.w, a.held))


@op(_product_and_codes)
def scaled_mm_keeping(
    x: Tensor | Encoded,
    w: Tensor,
    bias: Tensor | None,
    x_operand: Operand | None,
    w_operand: Operand,
    contract: str,
    lead: Sequence[int],
    dtype: torch.dtype,
    x_values: Tensor | None = None,
    strides: Sequence[int] | None = None,
    held: Scales | None = None,
) -> ProductAndCodes:
    """`scaled_mm` where backward reads W's codes too. held: scales of W that the layer holds."""
    values, alpha, reads = None, None, contracts.reads(contract)
    if reads == "codes" or held is not None or not w.is_cuda or w.dtype is not dtype:
        encoded = encode.body(w, w_operand, held)
    else:  # its operand in the same pass, and what the accumulator is multiplied by
        made = codec.encode_with_values(w_operand, w, dtype, operand=reads == "operand", keep=True)
        assert made.encoded is not None
        encoded, values, alpha = made.encoded, made.values, made.alpha
    call = Call(contract, x, x_operand, encoded, w_operand, bias, lead, dtype, strides, x_values, values, None, alpha)
    return ProductAndCodes(_multiplied(call), encoded)


@op(lambda a: a.grad_MN.new_empty(a.grad_MN.shape[0], a.w.k))
def dgrad(
    grad_MN: Tensor,
    w: Kept,
    pair: Pair | None = None,
    random: Tensor | None = None,
    grad_held: Scales | None = None,
) -> Tensor:
    """dx (M, K) = dy W^ in dy's dtype.

    pair: how dy and W^ are quantised along N; None: neither. random: the state of their random numbers, if they draw.
    grad_held: dy's scales, where they are delayed.
    """
    if grad_held is not None and pair is not None:
        rows = encode.body(grad_MN, pair.a_as, grad_held)
        return backward.of_codes(rows, w.columns(pair, grad_MN.dtype), pair, grad_MN.dtype)
    return dgrad_of_parts(grad_MN, w, pair, random, None)


def dgrad_of_parts(
    grad_MN: Tensor,
    w: Kept,
    pair: Pair | None,
    random: Tensor | None,
    parts: backward.Parts | None,
    made: CodesAndValues | None = None,
) -> Tensor:
    """`dgrad` of one rank; parts: of dy (M, N) and W^T (K, N). No op: the ranks communicate. made: dy's operand."""
    if pair is None:
        return grad_MN @ w.values(grad_MN.dtype).to(grad_MN.dtype)
    w_KN = w.transpose(grad_MN.dtype)
    return backward.product(grad_MN, w_KN, pair, random, DGRAD_GRAD_OUTPUT, parts, made)


@op(lambda a: a.grad_MN.new_empty(a.grad_MN.shape[1], a.x.k))
def wgrad(
    grad_MN: Tensor,
    x: Kept,
    pair: Pair | None = None,
    random: Tensor | None = None,
    grad_held: Scales | None = None,
) -> Tensor:
    """dW (N, K) = dy^T x^ in dy's dtype; pair, random, grad_held: as in `dgrad`, along M."""
    if grad_held is not None and pair is not None:
        rows = encode.body(grad_MN, pair.a_as, grad_held)
        turned = backward.transposed(rows, pair.a_as, pair.multiple)
        return backward.of_codes(turned, x.columns(pair, grad_MN.dtype), pair, grad_MN.dtype)
    return wgrad_of_parts(grad_MN, x, pair, random, None)


def wgrad_of_parts(
    grad_MN: Tensor,
    x: Kept,
    pair: Pair | None,
    random: Tensor | None,
    parts: backward.Parts | None,
    made: CodesAndValues | None = None,
) -> Tensor:
    """`wgrad` of one rank; parts: of dy^T (N, M) and x^T (K, M). made: dy^T's operand."""
    if pair is None:
        return grad_MN.t() @ x.values(grad_MN.dtype).to(grad_MN.dtype)
    x_KM = x.transpose(grad_MN.dtype)
    return backward.product(grad_MN.t(), x_KM, pair, random, WGRAD_GRAD_OUTPUT, parts, made)


class Columns(NamedTuple):
    """The column side of an (R, K) matrix: its transpose (K, R padded), encoded along R. No `Encoded`, whose width
    would be the matrix's.
    """

    codes: Tensor
    scale: Tensor | None
    zero: Tensor | None
    outer: Tensor | None


def _columns(a: Any) -> Columns:
    rows, k = a.x_MK.shape
    return _column_shapes(a.x_MK, rows, k, a.operand, a.multiple)


def _column_shapes(like: Tensor, rows: int, k: int, operand: Operand, multiple: int) -> Columns:
    padded = -(-torch.sym_max(rows, 1) // multiple) * multiple
    e: Encoded = operand.encode(like.new_empty(k, padded))
    return Columns(*e.tensors)


@op(_columns)
def encode_columns(x_MK: Tensor, operand: Operand, multiple: int) -> Columns:
    """Codes and scales of x^T along M, padded to a multiple of `multiple`: what `wgrad` reads of columns."""
    e = backward.columns(x_MK, operand, multiple)
    return Columns(*e.tensors)


class Input(NamedTuple):
    """What forward multiplies of its input, `encode_with_values` for the GEMM's operand, and the fields of the
    `Columns` that backward will read.
    """

    encoded: Encoded
    values: Tensor
    codes: Tensor
    scale: Tensor | None
    zero: Tensor | None
    outer: Tensor | None

    @property
    def columns(self) -> Columns:
        return Columns(self.codes, self.scale, self.zero, self.outer)


def _input_shapes(a: Any) -> Input:
    rows, k = a.x_MK.shape
    columns = _column_shapes(a.x_MK, rows, k, a.columns_as, a.multiple)
    return Input(a.operand.encode(a.x_MK), torch.empty_like(a.x_MK, memory_format=torch.contiguous_format), *columns)


@op(_input_shapes)
def encode_input(x_MK: Tensor, operand: Operand, columns_as: Operand, multiple: int) -> Input:
    """`encode_with_values` and `encode_columns` of x, in one pass over x where a kernel can."""
    if not x_MK.shape[0]:  # formats have no scale for nothing
        made = codec.encode_with_values(operand, x_MK, x_MK.dtype, operand=True, keep=True)
        columns = backward.columns(x_MK, columns_as, multiple)
    else:
        made, columns = codec.both_coded(x_MK, operand, columns_as, backward.padded_rows(x_MK.shape[0], multiple))
    assert made.encoded is not None
    return Input(made.encoded, made.values, *columns.tensors)


def _transposed_columns(a: Any) -> Columns:
    like = a.x.codes.new_empty(0, dtype=torch.bfloat16)
    return _column_shapes(like, a.x.codes.shape[0], a.x.k, a.operand, a.multiple)


@op(_transposed_columns)
def transposed(x: Encoded, operand: Operand, multiple: int) -> Columns:
    """`encode_columns` of what x encodes, by moving its codes: for a `square` format."""
    return Columns(*backward.transposed(x, operand, multiple).tensors)


@op(lambda a: a.grad_MN.new_empty(a.grad_MN.shape[1], dtype=a.dtype))
def bgrad(grad_MN: Tensor, dtype: torch.dtype) -> Tensor:
    """db (N,) in `dtype`, summed in float32. An op because compiled sums add in another order."""
    return grad_MN.sum(0, dtype=torch.float32).to(dtype)
