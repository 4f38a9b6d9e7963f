"""The codec in plain PyTorch: `Format` itself, some rows at a time where that saves memory (`tiles.py`)."""

from __future__ import annotations

import torch
from torch import Tensor

from aoquant.formats import Encoded, Format, Operand, Random, Scales, layout

from .. import tiles
from ..router import Backend, BothCoded, CodesAndValues, CodesOfBoth, Operands


def hold(operand: Operand, x_RK: Tensor, s: Scales) -> Encoded:
    """`operand.hold(x_RK, s)`."""
    return operand.format.hold(x_RK, s)


def decode(format: Format, e: Encoded, dtype: torch.dtype, operand: bool, out: torch.dtype) -> Tensor:
    """`format.operand(e, dtype)` or `format.decode(e, dtype)`, then cast to `out`."""
    return tiles.decoded(format, format.operand if operand else format.decode, e, dtype, out)


def encode_with_values(
    made: Operand,
    x_RK: Tensor,
    dtype: torch.dtype,
    operand: bool,
    keep: bool,
    measured: Tensor | None,
    random: Random | None,
) -> CodesAndValues:
    """Codes, if `keep`, and what they stand for. measured: an outer scale, which counts at random alone."""
    if random is None:
        e = tiles.encode(made, x_RK)
    else:
        e = made.encode(x_RK, None if measured is None else Scales(outer=measured), random)
    values = decode(made.format, e, dtype, operand, dtype)
    return CodesAndValues(e if keep else None, values, made.format.alpha(e))


def transform(operand: Operand, x_RK: Tensor, matrix: Tensor | None, back: bool, clipped: Tensor | None) -> Tensor:
    """`operand.transformed(x_RK, matrix)`, or back, zero where it is clipped."""
    if not back:
        return operand.transformed(x_RK, matrix)
    return operand.pull_back(x_RK if clipped is None else masked(x_RK, clipped), matrix)


def encode_fitted(operand: Operand, x_RK: Tensor, matrix: Tensor | None) -> Encoded:
    """Codes of `operand.transformed(x_RK, matrix)`."""
    from . import encode as fastest_encode
    from . import transform as fastest_transform

    return fastest_encode(operand.format, fastest_transform(operand, x_RK, matrix))


def rotate(operand: Operand, x_RK: Tensor, random: Random) -> Tensor:
    """x_RK rotated by drawn signs."""
    assert operand.transform is not None
    return operand.transform.apply(x_RK, False, random.signs(operand.transform.size))


def saturated(operand: Operand, x_RK: Tensor, matrix: Tensor | None) -> Tensor:
    """Bit-packed mask of clipped values, of transformed ones behind a transform."""
    from . import encode as fastest_encode
    from . import transform as fastest_transform

    y_RK = x_RK if operand.transform is None else fastest_transform(operand, x_RK, matrix)
    clipped = operand.format.saturated(y_RK, fastest_encode(operand.format, y_RK))
    return layout.pack(clipped.to(torch.uint8), 1)


def masked(grad_RK: Tensor, clipped: Tensor) -> Tensor:
    """Zero the gradient of clipped values, which `saturated` names."""
    return grad_RK.masked_fill(layout.unpack(clipped, 1, grad_RK.shape[1]).bool(), 0)


def transposed(codes: Tensor, k: int, padded: int, bits: int) -> Tensor:
    """Codes moved to where those of the transpose lie."""
    byte = layout.unpack(codes, 4, k) if bits == 4 else codes
    moved = torch.nn.functional.pad(byte.t(), (0, padded - codes.shape[0])).contiguous()
    return layout.pack(moved, 4) if bits == 4 else moved


def sides(operand: Operand, x_RK: Tensor, padded: int) -> CodesOfBoth:
    """Codes of x, and the same moved to where those of x^T lie."""
    from . import encode as fastest_encode
    from . import transposed as fastest_transposed

    e = fastest_encode(operand, x_RK)
    return CodesOfBoth(e, fastest_transposed(operand, e.codes.view(torch.uint8), e.k, padded))


def operands(
    x_MN: Tensor,
    rows: Operand | None,
    columns: Operand | None,
    m_padded: int,
    n_padded: int,
    dtype: torch.dtype,
    row_random: Random | None,
    column_random: Random | None,
) -> Operands:
    """The operands of x and of x^T, each by itself."""
    from . import encode_with_values as fastest

    x_NM, (m, n) = x_MN.t(), x_MN.shape
    if rows is not None and n < n_padded:
        x_MN = torch.nn.functional.pad(x_MN, (0, n_padded - n))
    if columns is not None and m < m_padded:
        x_NM = torch.nn.functional.pad(x_NM, (0, m_padded - m))
    return Operands(
        None if rows is None else fastest(rows, x_MN, dtype, operand=True, random=row_random),
        None if columns is None else fastest(columns, x_NM, dtype, operand=True, random=column_random),
    )


def both_coded(x_MK: Tensor, rows: Operand, columns: Operand, m_padded: int) -> BothCoded:
    """The codes and the operand of x, and the codes of x^T, each by itself."""
    from . import encode as fastest_encode
    from . import encode_with_values as fastest

    x_KM, missing = x_MK.t(), m_padded - x_MK.shape[0]
    x_KM = torch.nn.functional.pad(x_KM, (0, missing)) if missing else x_KM
    made = fastest(rows, x_MK, x_MK.dtype, operand=True, keep=True)
    return BothCoded(made, fastest_encode(columns, x_KM))


def _always(request: object) -> None:
    """No request is refused."""


BACKENDS = tuple(
    Backend("reference", 0, _always, run, role)
    for role, run in (
        ("encode", tiles.encode),
        ("hold", hold),
        ("decode", decode),
        ("quantize", encode_with_values),
        ("transform", transform),
        ("fitted", encode_fitted),
        ("rotate", rotate),
        ("saturate", saturated),
        ("transpose", transposed),
        ("sides", sides),
        ("operands", operands),
        ("both", both_coded),
    )
)
