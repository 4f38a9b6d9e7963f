"""The GEMMs of a backward whose operands are quantised, each along the axis that its GEMM contracts.

dgrad contracts N and wgrad contracts the rows of the batch, so an operand of backward is another encoding than
forward's, of another axis: of the value that forward multiplied (the decoded weight, the decoded input), so that
backward differentiates the function that forward computed, as Quartet and Quartet II do; or of the original, which
loses less. Square tiles and a scale of the whole tensor are the exception: there the other axis has the transposed
codes, and nothing is encoded again. Both operands are padded with zeros, which are inert, to what their formats and
their kernel take together. The product itself is a forward's: a contract, on whatever backend keeps it.

A backend that needs no codes multiplies operands that were never encoded, where x lies: an operand of x^T stays in x's
memory, and dy's two operands, for dgrad and for wgrad, come of one pass over dy. Both GEMMs are one op, `gradients`: a
compiled step calls each op through the dispatcher, which takes the host as long as a launch.
"""

from collections.abc import Callable
from functools import cache, cached_property
from math import lcm
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from aoquant.formats import Encoded, Operand, Random, Scales
from aoquant.formats.random import DGRAD_GRAD_OUTPUT, WGRAD_GRAD_OUTPUT, Place

from . import codec
from .call import Call
from .define import op
from .encoding import padded
from .quantized import CODES, Ask, Quantized, Side
from .router import Multiplier, Request, routed


class Part(NamedTuple):
    """An operand (R, C) of which this rank has a part.

    place: of the part. reduced: the scales of the whole from an operand and its rotated values here, together with the
    other ranks; None where no scale reaches over a cut.
    """

    place: Place
    reduced: Callable[[Operand, Tensor], Scales | None]

    def scales(self, operand: Operand, x_RC: Tensor, random: Random | None = None) -> Scales | None:
        """Scales of the whole that x_RC, padded, is a part of; None: its own are. A collective."""
        return self.reduced(operand, operand.rotated(x_RC, random) if x_RC.numel() else x_RC)


class Parts(NamedTuple):
    """Of the two operands of a backward GEMM."""

    a: Part
    b: Part


@cache
def contraction(a_as: Operand, b_as: Operand, contract: str) -> int:
    """The multiple to which the axis that a GEMM contracts is padded; FP8 tensor cores read 16 codes at once."""
    return lcm(a_as.period, b_as.period, 1 if contract == "aoquant" else 16)


class _Gemm(NamedTuple):
    grad: Operand | None = None
    other: Operand | None = None
    contract: str = "aoquant"
    forward: Operand | None = None
    keeps: str = "rows"


class BackwardGemm(_Gemm):
    """A GEMM of backward: dy (R, C) times what forward kept of W or of x, (S, C).

    grad, other: the operands that both are made to; None: high precision.
    forward: the other one's operand in forward, whose values are read; None: those of what was kept, as they are.
    keeps: what forward keeps of it (`law.py` says when):

        "rows"      what fprop multiplied                 its values
        "square"    the codes that fprop multiplied       the codes, transposed: square tiles, or one scale for all
        "columns"   codes along the other axis            the codes
        "values"    the high-precision tensor             the tensor, or its values in forward

    The last column is what the GEMM starts from. It encodes values along the other axis where `other` is an operand,
    and multiplies them as they are where it is None. "rows" are codes, or the input itself where fprop does not
    quantise it. Codes of a weight that are there anyhow (fixed, gathered or packed) are kept under "values" too, where
    `forward` names their operand.
    """

    @cached_property
    def multiple(self) -> int:
        """The contracted axis is padded to a multiple of it."""
        assert self.grad is not None and self.other is not None
        return contraction(self.grad, self.other, self.contract)

    def padded(self, c: int) -> int:
        """The length of the contracted axis, with zeros."""
        return padded(c, self.multiple)

    def multiplier(self, a_RC: Tensor, b: Tensor | Encoded, columns: int) -> Multiplier | None:
        """The product of two operands without codes, S = `columns`, on the backend of this GEMM; None where that reads
        codes.
        """
        rows, c = a_RC.shape
        if self.contract != "aoquant" or not a_RC.is_cuda or not rows or not c or not columns:
            return None
        assert self.grad is not None and self.other is not None
        formats, sizes = (self.grad.format, self.other.format), (rows, columns, self.padded(c))
        request = self.contract, *formats, a_RC.device, a_RC.dtype, *sizes, self.other.scale_dtype(b)
        return routed(Request, *request).multiply


class Kept(NamedTuple):
    """The operand of a backward GEMM that is no gradient, W of dgrad or x of wgrad, as forward kept it.

    matrix: (R, K), encoded along K, or values; or encoded along R, (K, R padded), where `gemm` keeps "columns".
    held: scales and the transform that the layer holds for it. measured: what forward measured of W.
    """

    matrix: Tensor | Encoded
    gemm: BackwardGemm
    held: Scales | None = None
    measured: Tensor | None = None

    @property
    def k(self) -> int:
        """K of the layer."""
        if isinstance(self.matrix, Tensor):
            return self.matrix.shape[1]
        return self.matrix.codes.shape[0] if self.gemm.keeps == "columns" else self.matrix.k

    @property
    def has_columns(self) -> bool:
        """Return whether its codes are those of the column side, or the same transposed."""
        return isinstance(self.matrix, Encoded) and self.gemm.keeps in ("square", "columns")

    def values(self, dtype: torch.dtype) -> Tensor:
        """(R, K): those of forward in `dtype`, or the matrix itself."""
        matrix, forward = self.matrix, self.gemm.forward
        if forward is None:
            assert isinstance(matrix, Tensor)
            return matrix
        if isinstance(matrix, Tensor) and self.held is None:
            asked = Ask(False, dtype, operand=False, measured=self.measured)
            made = codec.quantize(forward, matrix, asked).values
            assert made is not None
            return made
        e = matrix if isinstance(matrix, Encoded) else codec.encode(forward, matrix, self.held)
        return codec.decode(forward.format, e, dtype)

    def columns(self, dtype: torch.dtype) -> Encoded:
        """Codes (K, R padded) along R."""
        gemm = self.gemm
        assert gemm.other is not None
        if not self.has_columns:
            return columns(self.values(dtype), gemm.other, gemm.multiple)
        assert isinstance(self.matrix, Encoded)
        if gemm.keeps == "columns":
            return self.matrix
        return codec.transposed(gemm.other, self.matrix, gemm.padded(self.matrix.codes.shape[0]))

    def operand(self, padded: int, dtype: torch.dtype, state: Tensor | None, side: int) -> Side:
        """Make what a GEMM multiplies in `dtype`, (K, R padded), without codes."""
        gemm = self.gemm
        assert gemm.other is not None
        if not self.has_columns:
            return _operand(self.values(dtype).t(), gemm.other, padded, dtype, state, side)
        assert isinstance(self.matrix, Encoded)
        values = codec.decode(gemm.other.format, self.matrix, dtype, operand=True)
        if gemm.keeps == "square":
            missing = padded - values.shape[0]
            values = (pad(values, (0, 0, 0, missing)) if missing else values).t()
        return Side(None, values, gemm.other.format.alpha(self.matrix))


class Gradients(NamedTuple):
    """dx (M, K) and dW (N, K); None: not asked for."""

    dx: Tensor | None
    dw: Tensor | None


def _shapes(a: Any) -> Gradients:
    m, n = a.grad_MN.shape
    return Gradients(
        None if a.w is None else a.grad_MN.new_empty(m, a.w.k), None if a.x is None else a.grad_MN.new_empty(n, a.x.k)
    )


@op(_shapes, repeated=True)
def gradients(
    grad_MN: Tensor,
    w: Kept | None,
    x: Kept | None,
    random: Tensor | None = None,
    grad_held: Scales | None = None,
) -> Gradients:
    """dx (M, K) = dy W^, of w, and dW (N, K) = dy^T x^, of x, in dy's dtype: with one encoding of dy where both read
    the same codes, and one pass over it where both multiply operands.

    random: the state of the operands' random numbers, if they draw. grad_held: dy's scales, where they are delayed.
    """
    return of_parts(grad_MN, w, x, random, grad_held)


def of_parts(
    grad_MN: Tensor,
    w: Kept | None,
    x: Kept | None,
    random: Tensor | None = None,
    grad_held: Scales | None = None,
    of_dgrad: Parts | None = None,
    of_wgrad: Parts | None = None,
) -> Gradients:
    """`gradients` of one rank, whose parts of dy (M, N) and W^T (K, N), and of dy^T (N, M) and x^T (K, M), are given.
    No op: the ranks communicate.
    """
    dy = Quantized(None, None)
    dgrad = None if w is None or w.gemm.grad is None else w.gemm
    wgrad = None if x is None or x.gemm.grad is None else x.gemm
    if grad_held is not None:
        grad_as = (dgrad or wgrad).grad  # type: ignore[union-attr]
        assert grad_as is not None
        row = codec.encode(grad_as, grad_MN, grad_held)
        col = None if wgrad is None else Side(codec.transposed(grad_as, row, wgrad.padded(grad_MN.shape[0])))
        dy = Quantized(Side(row), col)
    elif dgrad is not None and wgrad is not None and of_dgrad is None:
        dy = _both_sides(grad_MN, w, x, random)  # type: ignore[arg-type]
    dx = dw = None
    if w is not None:
        if dgrad is None:
            dx = grad_MN @ w.values(grad_MN.dtype).to(grad_MN.dtype)
        else:
            dx = product(grad_MN, w, random, DGRAD_GRAD_OUTPUT, of_dgrad, dy.row)
    dy = dy._replace(row=None)
    if x is not None:
        if wgrad is None:
            dw = grad_MN.t() @ x.values(grad_MN.dtype).to(grad_MN.dtype)
        else:
            dw = product(grad_MN.t(), x, random, WGRAD_GRAD_OUTPUT, of_wgrad, dy.col)
    return Gradients(dx, dw)


def _both_sides(grad_MN: Tensor, w: Kept, x: Kept, state: Tensor | None) -> Quantized:
    """dy for both GEMMs: codes that both read, or operands of one pass; neither where each has its own codes."""
    (m, n), dgrad, wgrad = grad_MN.shape, w.gemm, x.gemm
    row, col = dgrad.grad, wgrad.grad
    assert row is not None and col is not None
    lengths = codec.Lengths(wgrad.padded(m), dgrad.padded(n))
    if row.shares_codes(col) and n == lengths.k and m:
        return codec.sides(grad_MN, row, col, lengths, CODES, CODES)
    if dgrad.multiplier(grad_MN, grad_MN, w.k) is None or wgrad.multiplier(grad_MN.t(), grad_MN, x.k) is None:
        return Quantized(None, None)
    asked = (
        Ask(False, grad_MN.dtype, random=_random(o, state, side))
        for o, side in ((row, DGRAD_GRAD_OUTPUT), (col, WGRAD_GRAD_OUTPUT))
    )
    return codec.sides(grad_MN, row, col, lengths, *asked)


def product(
    a_RC: Tensor,
    b: Kept,
    state: Tensor | None,
    side: int,
    parts: Parts | None = None,
    made: Side | None = None,
) -> Tensor:
    """(R, K) = a b in a's dtype, both operands quantised along C.

    state: of the random numbers, where an operand draws; side: of a, b's is the next. parts: of which a and b are this
    rank's. made: a as it was encoded together with another side.
    """
    rows, dtype, gemm, (a_as, b_as, contract, *_) = a_RC.shape[0], a_RC.dtype, b.gemm, b.gemm
    assert a_as is not None and b_as is not None
    if made is not None and made.encoded is not None:
        return of_codes(made.encoded, b.columns(dtype), gemm, dtype)
    if parts is None and (multiply := gemm.multiplier(a_RC, b.matrix, b.k)) is not None:
        padded = gemm.padded(a_RC.shape[1])
        a = made or _operand(a_RC, a_as, padded, dtype, state, side)
        other = b.operand(padded, dtype, state, side + 1)
        return multiply(a.matrix, a.alpha, other.matrix, other.alpha)
    part_a, part_b = parts or (None, None)
    # the ranks measure together, so before one leaves that has nothing
    a_from = _Source.of(a_RC, a_as, gemm.multiple, state, side, part_a)
    b_from = None
    if not b.has_columns:
        b_from = _Source.of(b.values(dtype).t(), b_as, gemm.multiple, state, side + 1, part_b)
    if not a_RC.numel() or not b.k:
        return a_RC.new_zeros(rows, b.k)
    if contract != "aoquant":  # codes are what its kernel reads
        return of_codes(a_from.codes(), b.columns(dtype) if b_from is None else b_from.codes(), gemm, dtype)
    of_a = a_from.encoded(dtype)
    if b_from is None:
        e = b.columns(dtype)
        of_b = Side(e, codec.decode(b_as.format, e, dtype, operand=True), b_as.format.alpha(e))
    else:
        of_b = b_from.encoded(dtype)
    values = of_a.values, of_b.values, of_a.alpha, of_b.alpha
    return Call(contract, of_a.codes, a_as, of_b.codes, b_as, None, [rows], dtype, None, *values).run()


def _operand(x_RC: Tensor, as_: Operand, padded: int, dtype: torch.dtype, state: Tensor | None, side: int) -> Side:
    """Return what a GEMM multiplies of x in `dtype`, with zeros behind C, without codes."""
    asked = Ask(False, dtype, random=_random(as_, state, side))
    if x_RC.stride(0) == 1 and x_RC.t().is_contiguous():
        made = codec.sides(x_RC.t(), None, as_, codec.Lengths(padded, x_RC.shape[0]), CODES, asked).col
    else:
        made = codec.sides(x_RC, as_, None, codec.Lengths(x_RC.shape[0], padded), asked, CODES).row
    assert made is not None
    return made


def _random(operand: Operand, state: Tensor | None, side: int, place: Place | None = None) -> Random | None:
    if not operand.draws:
        return None
    assert state is not None
    return Random(state, side, place)


def of_codes(a: Encoded, b: Encoded, gemm: BackwardGemm, dtype: torch.dtype) -> Tensor:
    """(R, S) = a b^T in `dtype`, both encoded along C. a of one byte a code may lack b's padding."""
    rows, missing = a.codes.shape[0], b.codes.shape[1] - a.codes.shape[1]
    if missing > 0:
        codes = codec.longer(a.codes.view(torch.uint8), b.codes.shape[1])
        a = a._replace(codes=codes.view(a.codes.dtype), k=b.k)
    if not a.codes.numel() or not b.codes.numel():
        return a.codes.new_zeros(rows, b.codes.shape[0], dtype=dtype)
    assert gemm.other is not None
    return Call(gemm.contract, a, gemm.grad, b, gemm.other, None, [rows], dtype).run()


def columns(x_RC: Tensor, operand: Operand, multiple: int, part: Part | None = None) -> Encoded:
    """Codes of x^T (C, R) along R, padded to a multiple of `multiple`: the column side of x. part: that x^T is."""
    source = _Source.of(x_RC.t(), operand, multiple, None, 0, part)
    if not x_RC.shape[0]:  # formats have no scale for nothing
        return codec.encode(operand, x_RC.new_zeros(x_RC.shape[1], multiple))
    return source.codes()


def _padded(x_RC: Tensor, multiple: int) -> Tensor:
    missing = -x_RC.shape[1] % multiple
    return codec.longer(x_RC, x_RC.shape[1] + missing) if missing else x_RC


class _Source(NamedTuple):
    """What an operand is made of: values padded along C, and where scales and random numbers come from."""

    x_RC: Tensor
    operand: Operand
    random: Random | None
    held: Scales | None

    @classmethod
    def of(
        cls, x_RC: Tensor, operand: Operand, multiple: int, state: Tensor | None, side: int, part: Part | None
    ) -> "_Source":
        x_RC = _padded(x_RC, multiple)
        random = _random(operand, state, side, None if part is None else part.place.padded(multiple))
        return cls(x_RC, operand, random, None if part is None else part.scales(operand, x_RC, random))

    def codes(self) -> Encoded:
        """Codes of an operand that does not draw."""
        if self.held is None:
            return codec.encode(self.operand, self.x_RC)
        return self.operand.encode(self.x_RC, self.held)

    def encoded(self, dtype: torch.dtype) -> Side:
        """Codes, and the GEMM's operand in `dtype`."""
        format, outer = self.operand.format, None
        if self.held is not None:
            if not format.draws:
                e = self.operand.encode(self.x_RC, self.held, self.random)
                return Side(e, codec.decode(format, e, dtype, operand=True), format.alpha(e))
            outer = self.held.outer
        return codec.quantize(self.operand, self.x_RC, Ask(True, dtype, measured=outer, random=self.random))
