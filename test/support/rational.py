"""Exact rational arithmetic, rounded once: the oracle that shares no code and no floating point with what it checks."""

from fractions import Fraction

import torch

# dtype -> bits of the significand, exponent of the smallest normal number
GRID = {torch.float32: (24, -126), torch.bfloat16: (8, -126), torch.float16: (11, -14)}


def exponent(x: Fraction, *, up: bool = False) -> int:
    """floor (or ceil) of log2 x, for x > 0."""
    e = x.numerator.bit_length() - x.denominator.bit_length()
    e -= x < Fraction(2) ** e
    return e + (up and x > Fraction(2) ** e)


def rounded(exact: Fraction, dtype: torch.dtype) -> Fraction:
    """exact, half to even on dtype's grid, subnormals included; overflow is not modelled."""
    if exact == 0:
        return exact
    bits, smallest = GRID[dtype]
    step = Fraction(2) ** (max(exponent(abs(exact)), smallest) - bits + 1)
    return round(exact / step) * step  # Fraction rounds half to even
