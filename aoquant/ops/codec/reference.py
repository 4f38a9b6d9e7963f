"""The codec in plain PyTorch: `Format` itself, some rows at a time where that saves memory (`tiles.py`).

It calls no other backend, so that kernels are checked against the definition. An operand with a transform comes here
without it: `codec.quantize` transforms first, which is the definition too.
"""

import torch
from torch import Tensor

from aoquant.formats import Operand, Random, Scales, layout, tiles

from ..quantized import Ask, Side
from ..router import Backend


def quantize(operand: Operand, x_RK: Tensor, ask: Ask) -> Side:
    """Codes of x, and what they stand for."""
    if ask.random is not None:
        measured = None if ask.measured is None else Scales(outer=ask.measured)
        e = operand.encode(x_RK, measured, ask.random)
    elif ask.held is not None and not ask.held.dynamic:
        e = operand.format.hold(x_RK, ask.held)
    else:
        e = tiles.encode(operand, x_RK)
    if ask.values is None:
        return Side(e)
    values = tiles.decode(operand.format, e, ask.values, operand=ask.operand)
    return Side(e if ask.codes else None, values, operand.format.alpha(e))


def transform(
    operand: Operand, x_RK: Tensor, matrix: Tensor | Random | None, back: bool, clipped: Tensor | None
) -> Tensor:
    """`operand.transformed(x_RK, matrix)`, or rotated by drawn signs; or back, zero where it is clipped."""
    if isinstance(matrix, Random):
        return operand.rotated(x_RK, matrix)
    if not back:
        return operand.transformed(x_RK, matrix)
    return operand.pull_back(x_RK if clipped is None else masked(x_RK, clipped), matrix)


def masked(grad_RK: Tensor, clipped: Tensor) -> Tensor:
    """Zero the gradient of clipped values, which `saturated` names."""
    return grad_RK.masked_fill(layout.unpack(clipped, 1, grad_RK.shape[1]).bool(), 0)


def transposed(codes: Tensor, k: int, padded: int, bits: int) -> Tensor:
    """Codes moved to where those of the transpose lie."""
    byte = layout.unpack(codes, 4, k) if bits == 4 else codes
    moved = torch.nn.functional.pad(byte.t(), (0, padded - codes.shape[0])).contiguous()
    return layout.pack(moved, 4) if bits == 4 else moved


def _always(request: object) -> None:
    """No request is refused."""


BACKENDS = tuple(
    Backend("reference", 0, _always, run, role)
    for role, run in (
        ("quantize", quantize),
        ("decode", tiles.decode),
        ("transform", transform),
        ("transpose", transposed),
    )
)
