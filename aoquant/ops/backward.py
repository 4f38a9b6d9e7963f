"""The GEMMs of a backward whose operands are quantised, each along the axis that its GEMM contracts.

dgrad contracts N and wgrad contracts the rows of the batch, so an operand of backward is another encoding than
forward's, of another axis: of the value that forward multiplied (the decoded weight, the decoded input), so that
backward differentiates the function that forward computed, as Quartet and Quartet II do; or of the original, which
loses less. Square tiles and a scale of the whole tensor are the exception: there the other axis has the transposed
codes, and nothing is encoded again. Both operands are padded with zeros, which are inert, to what their formats and
their kernel take together. The product itself is a forward's: a contract, on whatever backend keeps it.

A backend that needs no codes multiplies operands that were never encoded, where x lies: an operand of x^T stays in x's
memory, and dy's two operands, for dgrad and for wgrad, come of one pass over dy (`both`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property
from math import lcm
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from aoquant.formats import Encoded, Operand, Random, Randomized, Scales
from aoquant.formats.random import DGRAD_GRAD_OUTPUT, WGRAD_GRAD_OUTPUT, Place

from . import codec
from .call import Call, scale_dtype
from .encoding import encode
from .router import CodesAndValues, Multiplier, Operands, Request, routed


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


class Turned(NamedTuple):
    """x^T, by the codes of x in a `square` format."""

    encoded: Encoded


class _Pair(NamedTuple):
    a_as: Operand
    b_as: Operand
    contract: str = "aoquant"


class Pair(_Pair):
    """A backward GEMM of a (R, C), which is dy, and b (S, C): how both are made."""

    @cached_property
    def multiple(self) -> int:
        return contraction(*self)

    def padded(self, c: int) -> int:
        """The length of the contracted axis, with zeros."""
        return padded_rows(c, self.multiple)

    def multiplier(self, a_RC: Tensor, b: Tensor | Encoded, columns: int) -> Multiplier | None:
        """The product of two operands without codes, S = `columns`, on the backend of this GEMM; None where that reads
        codes.
        """
        rows, c = a_RC.shape
        if self.contract != "aoquant" or not a_RC.is_cuda or not rows or not c or not columns:
            return None
        formats, sizes = (self.a_as.format, self.b_as.format), (rows, columns, self.padded(c))
        request = self.contract, *formats, a_RC.device, a_RC.dtype, *sizes, scale_dtype(self.b_as, b)
        return routed(Request, *request).multiply


class Kept(NamedTuple):
    """The operand of a backward GEMM that is no gradient, W of dgrad or x of wgrad, as forward kept it.

    matrix: (R, K), encoded along K, or values; or encoded along R, (K, R padded), where it keeps "columns".
    forward: its operand in forward, whose values backward reads; None: values are read as they are. held: scales and
        the transform that the layer holds for it. measured: what `scaled_mm` measured of W.
    keeps: as `layers/sides.py` says; what matters here is "square", codes that are transposed, and "columns".
    """

    matrix: Tensor | Encoded
    forward: Operand | None = None
    held: Scales | None = None
    measured: Tensor | None = None
    keeps: str = "rows"

    @property
    def k(self) -> int:
        """K of the layer."""
        if isinstance(self.matrix, Tensor):
            return self.matrix.shape[1]
        return self.matrix.codes.shape[0] if self.keeps == "columns" else self.matrix.k

    def values(self, dtype: torch.dtype) -> Tensor:
        """(R, K): those of forward in `dtype`, or the matrix itself."""
        if self.forward is None:
            assert isinstance(self.matrix, Tensor)
            return self.matrix
        if isinstance(self.matrix, Tensor) and self.held is None:
            return codec.encode_with_values(self.forward, self.matrix, dtype, measured=self.measured).values
        e = self.matrix if isinstance(self.matrix, Encoded) else encode.body(self.matrix, self.forward, self.held)
        return codec.decode(self.forward.format, e, dtype)

    def transpose(self, dtype: torch.dtype) -> Tensor | Encoded | Turned:
        """(K, R), for `product`."""
        if isinstance(self.matrix, Encoded) and self.keeps in ("square", "columns"):
            return Turned(self.matrix) if self.keeps == "square" else self.matrix
        return self.values(dtype).t()

    def columns(self, pair: Pair, dtype: torch.dtype) -> Encoded:
        """Codes (K, R padded) along R."""
        b_KR = self.transpose(dtype)
        if isinstance(b_KR, Turned):
            return transposed(b_KR.encoded, pair.b_as, pair.multiple)
        return b_KR if isinstance(b_KR, Encoded) else columns(b_KR.t(), pair.b_as, pair.multiple)


def product(
    a_RC: Tensor,
    b_SC: Tensor | Encoded | Turned,
    pair: Pair,
    state: Tensor | None,
    side: int,
    parts: Parts | None = None,
    made: CodesAndValues | None = None,
) -> Tensor:
    """(R, S) = a b^T in a's dtype, both operands quantised along C, R and S rows of any number.

    b_SC: encoded here, or encoded already, padded along C. state: of the random numbers, where an operand draws; side:
        of a, b's is the next. parts: of which a and b are this rank's. made: the operand of a_RC, by `both`.
    """
    rows, columns, (a_as, b_as, contract) = a_RC.shape[0], _rows(b_SC), pair
    like = b_SC.encoded if isinstance(b_SC, Turned) else b_SC
    if parts is None and (multiply := pair.multiplier(a_RC, like, columns)) is not None:
        padded, dtype = pair.padded(a_RC.shape[1]), a_RC.dtype
        made = made or operand(a_RC, a_as, padded, dtype, state, side)
        other = operand(b_SC, b_as, padded, dtype, state, side + 1)
        return multiply(made.values, made.alpha, other.values, other.alpha)
    if isinstance(b_SC, Turned):
        b_SC = transposed(b_SC.encoded, b_as, pair.multiple)
    part_a, part_b = parts or (None, None)
    # the ranks measure together, so before one leaves that has nothing
    a_from = _Source.of(a_RC, a_as, pair.multiple, state, side, part_a)
    b_from = None if isinstance(b_SC, Encoded) else _Source.of(b_SC, b_as, pair.multiple, state, side + 1, part_b)
    if not a_RC.numel() or not columns:
        return a_RC.new_zeros(rows, columns)
    if contract != "aoquant":  # codes are what its kernel reads
        encoded = b_SC if isinstance(b_SC, Encoded) else b_from.codes()  # type: ignore[union-attr]
        return of_codes(a_from.codes(), encoded, pair, a_RC.dtype)
    a = a_from.encoded(a_RC.dtype)
    if b_from is None:
        assert isinstance(b_SC, Encoded)
        decoded = codec.decode(b_as.format, b_SC, a_RC.dtype, operand=True)
        b = CodesAndValues(b_SC, decoded, b_as.format.alpha(b_SC))
    else:
        b = b_from.encoded(a_RC.dtype)
    assert a.encoded is not None and b.encoded is not None
    values = a.values, b.values, a.alpha, b.alpha
    return Call(contract, a.encoded, a_as, b.encoded, b_as, None, [rows], a_RC.dtype, None, *values).run()


def _rows(x_RC: Tensor | Encoded | Turned) -> int:
    if isinstance(x_RC, Turned):
        return x_RC.encoded.k
    return (x_RC.codes if isinstance(x_RC, Encoded) else x_RC).shape[0]


def operand(
    x_RC: Tensor | Encoded | Turned, as_: Operand, padded: int, dtype: torch.dtype, state: Tensor | None, side: int
) -> CodesAndValues:
    """What a GEMM multiplies of x in `dtype`, with zeros behind C, without codes."""
    if isinstance(x_RC, Encoded | Turned):
        e = x_RC.encoded if isinstance(x_RC, Turned) else x_RC
        values = codec.decode(as_.format, e, dtype, operand=True)
        if isinstance(x_RC, Turned):
            missing = padded - values.shape[0]
            values = (pad(values, (0, 0, 0, missing)) if missing else values).t()
        return CodesAndValues(None, values, as_.format.alpha(e))
    random = _random(as_, state, side)
    if x_RC.stride(0) == 1 and x_RC.t().is_contiguous():
        made = codec.operands(x_RC.t(), None, as_, padded, x_RC.shape[0], dtype, None, random).columns
    else:
        made = codec.operands(x_RC, as_, None, x_RC.shape[0], padded, dtype, random, None).rows
    assert made is not None
    return made


def both(grad_MN: Tensor, w: Kept, dgrad: Pair, x: Kept, wgrad: Pair, state: Tensor | None) -> Operands | None:
    """dy's operands for both GEMMs, in one pass over dy; None where one of them reads codes."""
    m, n = grad_MN.shape
    if dgrad.multiplier(grad_MN, grad_MN, w.k) is None or wgrad.multiplier(grad_MN.t(), grad_MN, x.k) is None:
        return None
    return codec.operands(
        grad_MN, dgrad.a_as, wgrad.a_as, wgrad.padded(m), dgrad.padded(n), grad_MN.dtype,
        _random(dgrad.a_as, state, DGRAD_GRAD_OUTPUT), _random(wgrad.a_as, state, WGRAD_GRAD_OUTPUT),
    )  # fmt: skip


@cache
def shares_codes(dgrad: Operand, wgrad: Operand) -> bool:
    """Whether dy's codes for wgrad are those for dgrad, transposed."""
    return dgrad.name == wgrad.name and dgrad.transform is None and dgrad.format.square and not dgrad.draws


def _random(operand: Operand, state: Tensor | None, side: int) -> Random | None:
    if not operand.draws:
        return None
    assert state is not None
    return Random(state, side, None)


def of_codes(a: Encoded, b: Encoded, pair: Pair, dtype: torch.dtype) -> Tensor:
    """(R, S) = a b^T in `dtype`, both encoded along C. a of one byte a code may lack b's padding."""
    rows, missing = a.codes.shape[0], b.codes.shape[1] - a.codes.shape[1]
    if missing > 0:
        a = a._replace(codes=pad(a.codes.view(torch.uint8), (0, missing)).view(a.codes.dtype), k=b.k)
    if not a.codes.numel() or not b.codes.numel():
        return a.codes.new_zeros(rows, b.codes.shape[0], dtype=dtype)
    return Call(pair.contract, a, pair.a_as, b, pair.b_as, None, [rows], dtype).run()


def columns(x_RC: Tensor, operand: Operand, multiple: int, part: Part | None = None) -> Encoded:
    """Codes of x^T (C, R) along R, padded to a multiple of `multiple`: the column side of x. part: that x^T is."""
    held = None if part is None else part.scales(operand, _padded(x_RC.t(), multiple))
    if not x_RC.shape[0]:  # formats have no scale for nothing
        return codec.encode(operand, x_RC.new_zeros(x_RC.shape[1], multiple))
    x_CR = _padded(x_RC.t(), multiple)
    return codec.encode(operand, x_CR) if held is None else operand.encode(x_CR, held)


def transposed(e: Encoded, operand: Operand, multiple: int, codes: Tensor | None = None) -> Encoded:
    """The codes (C, R) of x^T, padded like `columns`, from those (R, C) of x, in a format that is `square`. codes: the
    transposed ones, if they are there.
    """
    format, padded = operand.format, padded_rows(e.codes.shape[0], multiple)
    if codes is None:
        codes = codec.transposed(operand, e.codes.view(torch.uint8), e.k, padded)
    scale = e.scale
    if scale is not None and format.block is not None:
        stored = scale.view(torch.uint8) if scale.element_size() == 1 else scale
        scale = pad(stored.t(), (0, padded // format.block - stored.shape[0])).contiguous().view(scale.dtype)
    return Encoded(codes.view(e.codes.dtype), scale, e.zero, e.outer, padded)


def padded_rows(rows: int, multiple: int) -> int:
    """Rows of x as a column side has them: at least one multiple."""
    return -(-max(rows, 1) // multiple) * multiple


def _padded(x_RC: Tensor, multiple: int) -> Tensor:
    missing = -x_RC.shape[1] % multiple
    return pad(x_RC, (0, missing)) if missing else x_RC


class _Source(NamedTuple):
    """What an operand is made of: values padded along C, and where scales and random numbers come from."""

    x_RC: Tensor
    operand: Operand
    random: Random | None
    held: Scales | None

    @classmethod
    def of(
        cls, x_RC: Tensor, operand: Operand, multiple: int, state: Tensor | None, side: int, part: Part | None
    ) -> _Source:
        x_RC, random = _padded(x_RC, multiple), None
        if operand.draws:
            assert state is not None
            random = Random(state, side, None if part is None else part.place.padded(multiple))
        return cls(x_RC, operand, random, None if part is None else part.scales(operand, x_RC, random))

    def codes(self) -> Encoded:
        """Codes of an operand that does not draw."""
        if self.held is None:
            return codec.encode(self.operand, self.x_RC)
        return self.operand.encode(self.x_RC, self.held)

    def encoded(self, dtype: torch.dtype) -> CodesAndValues:
        """Codes, and the GEMM's operand in `dtype`."""
        format, outer = self.operand.format, None
        if self.held is not None:
            if not isinstance(format, Randomized):
                e = self.operand.encode(self.x_RC, self.held, self.random)
                return CodesAndValues(e, codec.decode(format, e, dtype, operand=True), format.alpha(e))
            outer = self.held.outer
        return codec.encode_with_values(
            self.operand, self.x_RC, dtype, operand=True, keep=True, measured=outer, random=self.random
        )
