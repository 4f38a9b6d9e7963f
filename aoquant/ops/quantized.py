"""A quantised matrix: one type, with a side for each axis along which a GEMM may contract it.

    row   x (R, K), encoded along K        col   x^T (K, R), encoded along R

A side holds codes, or what a matrix unit multiplies, or both: a kernel that makes both reads x once. `Ask` says which.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from aoquant.formats import Encoded, Random, Scales


class Side(NamedTuple):
    """Hold what is made of a matrix (R, K), each None where it was not asked for.

    encoded: codes and scales. values: (R, K), a GEMM's operand or decoded values; of a column side they may lie in
    memory as x does. alpha: (R, 1) or (1, 1) float32, by which an operand's accumulator is multiplied, or None for 1.
    """

    encoded: Encoded | None = None
    values: Tensor | None = None
    alpha: Tensor | None = None

    @property
    def codes(self) -> Encoded:
        """Codes that were asked for."""
        assert self.encoded is not None
        return self.encoded

    @property
    def matrix(self) -> Tensor:
        """Values that were asked for."""
        assert self.values is not None
        return self.values


class Quantized(NamedTuple):
    """Both sides of a matrix; None: not asked for."""

    row: Side | None
    col: Side | None


class Ask(NamedTuple):
    """Say what to make of a matrix along one axis, and from which numbers.

    codes: whether codes are kept. values: the dtype of values, or None. operand: whether values are the GEMM's operand,
    as opposed to decoded ones.
    held: scales from elsewhere, and the matrices of a fitted transform.
    measured: the outer scale that an earlier call found for these very values: a backend need not look for it again.
    random: where the numbers come from, for an operand that draws.
    """

    codes: bool = True
    values: torch.dtype | None = None
    operand: bool = True
    held: Scales | None = None
    measured: Tensor | None = None
    random: Random | None = None

    @property
    def form(self) -> str:
        """Return how an encoder makes the values: "" for none, "operand", or "decode" with all scales."""
        return "" if self.values is None else "operand" if self.operand else "decode"


CODES = Ask()
