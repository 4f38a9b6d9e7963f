"""Ops of a linear layer: its three GEMMs, and the sum that is its bias's gradient.

`dgrad` encodes the weight again, so that a compiled backward has nothing to keep of it but the parameter itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from aoquant.formats import Encoded, Operand, Scales
from aoquant.formats.random import DGRAD_GRAD_OUTPUT, WGRAD_GRAD_OUTPUT

from . import backward, codec
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
    w_values: Tensor | None = None,
) -> Product:
    """y (*lead, N) in `dtype` under `contract`.

    x: (*lead, K) without x_operand, else encoded after being flattened to (M, K). w: (N, K), encoded here, or encoded
        already.
    x_values, w_values: what the contract reads of an encoded x or w (`contracts.reads`), where encoding made it in
        passing.
    strides: of the decoded (*lead, K) input, for "dequantize" with an encoded x that was not contiguous.
    """
    call = Call(contract, x, x_operand, w, w_operand, bias, lead, dtype, strides, x_values, w_values)
    if 0 in lead:
        y = call.w_rows.new_empty(*lead, call.w_rows.shape[0], dtype=dtype)
    else:
        y = call.run()
    # no view, for autograd: `relu_` of a Function's view is an error
    y = torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y
    found = isinstance(w, Tensor) and codec.finds_outer(w_operand)
    return Product(y, call.alpha_w if found else None)


@op(lambda a: a.grad_MN.new_empty(a.grad_MN.shape[0], a.w.k if isinstance(a.w, Encoded) else a.w.shape[1]))
def dgrad(
    grad_MN: Tensor,
    w: Tensor | Encoded,
    w_operand: Operand | None,
    held: Scales | None = None,
    measured: Tensor | None = None,
    grad_as: Operand | None = None,
    w_as: Operand | None = None,
    random: Tensor | None = None,
    transposes: bool = False,
    contract: str = "aoquant",
) -> Tensor:
    """dx (M, K) = dy W^ in dy's dtype; w (N, K) is encoded here, or encoded already, or read as it is without
    w_operand.

    measured: what `scaled_mm` measured of W. grad_as, w_as: what dy and W^ are encoded as along N, None for high
        precision.
    random: the state of their random numbers, if they draw. transposes: w's codes, transposed, are those of w_as.
    contract: of the product of two quantised operands.
    """
    return dgrad_of_parts(grad_MN, w, w_operand, held, measured, grad_as, w_as, random, transposes, contract, None)


def dgrad_of_parts(
    grad_MN: Tensor,
    w: Tensor | Encoded,
    w_operand: Operand | None,
    held: Scales | None,
    measured: Tensor | None,
    grad_as: Operand | None,
    w_as: Operand | None,
    random: Tensor | None,
    transposes: bool,
    contract: str,
    parts: backward.Parts | None,
    made: CodesAndValues | None = None,
) -> Tensor:
    """`dgrad` of one rank; parts: of dy (M, N) and W^T (K, N). No op: the ranks communicate. made: dy's operand."""
    dtype = grad_MN.dtype
    if transposes:
        assert isinstance(w, Encoded) and grad_as is not None and w_as is not None
        w_KN = backward.Turned(w)
        return backward.product(grad_MN, w_KN, grad_as, w_as, random, DGRAD_GRAD_OUTPUT, contract, parts, made)
    if w_operand is None:
        assert isinstance(w, Tensor)
        w_NK = w if w_as is not None else w.to(dtype)
    elif isinstance(w, Tensor) and held is None:
        w_NK = codec.encode_with_values(w_operand, w, dtype, measured=measured).values
    else:
        e = w if isinstance(w, Encoded) else encode.body(w, w_operand, held)
        w_NK = codec.decode(w_operand.format, e, dtype)
    if grad_as is None or w_as is None:
        return grad_MN @ w_NK
    return backward.product(grad_MN, w_NK.t(), grad_as, w_as, random, DGRAD_GRAD_OUTPUT, contract, parts, made)


@op(lambda a: a.grad_MN.new_empty(a.grad_MN.shape[1], a.x.k if isinstance(a.x, Encoded) else a.x.shape[1]))
def wgrad(
    grad_MN: Tensor,
    x: Tensor | Encoded,
    x_operand: Operand | None,
    held: Scales | None = None,
    grad_as: Operand | None = None,
    x_as: Operand | None = None,
    random: Tensor | None = None,
    transposes: bool = False,
    contract: str = "aoquant",
) -> Tensor:
    """dW (N, K) = dy^T x^ in dy's dtype; x is encoded, or (M, K) and encoded here, or multiplied as it is without
    x_operand.

    grad_as, x_as, random, transposes, contract: as in `dgrad`, along M.
    """
    return wgrad_of_parts(grad_MN, x, x_operand, held, grad_as, x_as, random, transposes, contract, None)


def wgrad_of_parts(
    grad_MN: Tensor,
    x: Tensor | Encoded,
    x_operand: Operand | None,
    held: Scales | None,
    grad_as: Operand | None,
    x_as: Operand | None,
    random: Tensor | None,
    transposes: bool,
    contract: str,
    parts: backward.Parts | None,
    made: CodesAndValues | None = None,
) -> Tensor:
    """`wgrad` of one rank; parts: of dy^T (N, M) and x^T (K, M). made: dy^T's operand."""
    if transposes:
        assert isinstance(x, Encoded) and grad_as is not None and x_as is not None
        x_KM = backward.Turned(x)
        return backward.product(grad_MN.t(), x_KM, grad_as, x_as, random, WGRAD_GRAD_OUTPUT, contract, parts, made)
    if x_operand is None:
        assert isinstance(x, Tensor)
        x_MK = x.to(grad_MN.dtype)
    else:
        e = x if isinstance(x, Encoded) else encode.body(x, x_operand, held)
        x_MK = codec.decode(x_operand.format, e, grad_MN.dtype)
    if grad_as is None or x_as is None:
        return grad_MN.t() @ x_MK
    return backward.product(grad_MN.t(), x_MK.t(), grad_as, x_as, random, WGRAD_GRAD_OUTPUT, contract, parts, made)


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
    """Codes and scales of x^T along M, padded to a multiple of `multiple`: what `wgrad_of_columns` reads of x."""
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


class Sides(NamedTuple):
    """An encoded matrix, and its column side: the fields of `Columns`."""

    rows: Encoded
    codes: Tensor
    scale: Tensor | None
    zero: Tensor | None
    outer: Tensor | None

    @property
    def columns(self) -> Columns:
        return Columns(self.codes, self.scale, self.zero, self.outer)


def _side_shapes(a: Any) -> Sides:
    rows, k = a.x_RK.shape
    return Sides(a.operand.encode(a.x_RK), *_column_shapes(a.x_RK, rows, k, a.operand, a.multiple))


@op(_side_shapes)
def encode_sides(x_RK: Tensor, operand: Operand, multiple: int) -> Sides:
    """`encode` and `encode_columns` of x in a `square` format, in one pass over x where a kernel can."""
    made = codec.sides(operand, x_RK, backward.padded_rows(x_RK.shape[0], multiple))
    return Sides(made.rows, *backward.transposed(made.rows, operand, multiple, made.columns).tensors)


@op(lambda a: a.x.codes.new_empty(a.x.codes.shape[0], a.y.codes.shape[0], dtype=a.dtype))
def product(x: Encoded, y: Encoded, x_as: Operand, y_as: Operand, contract: str, dtype: torch.dtype) -> Tensor:
    """(R, S) = x y^T in `dtype`, both encoded along C already: a backward GEMM. x of one byte a code may lack y's
    padding.
    """
    if x.codes.shape[1] < y.codes.shape[1]:
        codes = pad(x.codes.view(torch.uint8), (0, y.codes.shape[1] - x.codes.shape[1])).view(x.codes.dtype)
        x = x._replace(codes=codes, k=y.k)
    if not x.codes.numel() or not y.codes.numel():
        return x.codes.new_zeros(x.codes.shape[0], y.codes.shape[0], dtype=dtype)
    return backward.of_codes(x, y, x_as, y_as, contract, dtype)


@op(lambda a: a.grad_MN.new_empty(a.grad_MN.shape[0], a.w.codes.shape[0]))
def dgrad_of_columns(
    grad_MN: Tensor,
    w: Encoded,
    grad_as: Operand,
    w_as: Operand,
    random: Tensor | None = None,
    contract: str = "aoquant",
) -> Tensor:
    """dx (M, K) = dy W^ in dy's dtype, from the column side of W."""
    return backward.product(grad_MN, w, grad_as, w_as, random, DGRAD_GRAD_OUTPUT, contract)


@op(lambda a: a.grad_MN.new_empty(a.grad_MN.shape[1], a.x.codes.shape[0]))
def wgrad_of_columns(
    grad_MN: Tensor,
    x: Encoded,
    grad_as: Operand,
    x_as: Operand,
    random: Tensor | None = None,
    contract: str = "aoquant",
) -> Tensor:
    """dW (N, K) = dy^T x^ in dy's dtype, from the column side of x that `encode_columns` made in forward."""
    return wgrad_of_column_parts(grad_MN, x, grad_as, x_as, random, contract, None)


def wgrad_of_column_parts(
    grad_MN: Tensor,
    x: Encoded,
    grad_as: Operand,
    x_as: Operand,
    random: Tensor | None,
    contract: str,
    parts: backward.Parts | None,
    made: CodesAndValues | None = None,
) -> Tensor:
    """`wgrad_of_columns` of one rank; parts: of dy^T (N, M) and x^T (K, M). made: dy^T's operand."""
    return backward.product(grad_MN.t(), x, grad_as, x_as, random, WGRAD_GRAD_OUTPUT, contract, parts, made)


@op(lambda a: a.grad_MN.new_empty(a.grad_MN.shape[1], dtype=a.dtype))
def bgrad(grad_MN: Tensor, dtype: torch.dtype) -> Tensor:
    """db (N,) in `dtype`, summed in float32. An op because compiled sums add in another order."""
    return grad_MN.sum(0, dtype=torch.float32).to(dtype)
