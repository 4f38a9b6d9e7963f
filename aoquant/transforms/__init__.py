"""Transforms: invertible maps of blocks along K, applied to both operands of a GEMM before they are quantised.

    y = x W^T = (x T^T) (W T^-1)^T          x_blk -> x_blk T^T,   w_blk -> w_blk T^-1

The product does not change, the numbers that are rounded do: an outlier is spread over its block, and what is rounded
is closer to normally distributed. A transform is a frozen value, like a format; `formats.Operand` holds one of each.
"""

from __future__ import annotations

from .base import Transform, parse
from .hadamard import Hadamard
from .rotation import Rotation
from .rounded import RoundedHadamard
from .wush import WUSH

__all__ = ["WUSH", "Hadamard", "Rotation", "RoundedHadamard", "Transform", "parse"]
