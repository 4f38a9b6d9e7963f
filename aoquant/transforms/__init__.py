"""Transforms: invertible maps of blocks along K, applied to both operands of a GEMM before they are quantised.

    y = x W^T = (x T^T) (W T^-1)^T          x_blk -> x_blk T^T,   w_blk -> w_blk T^-1

The product does not change, the numbers that are rounded do: an outlier is spread over its block, and what is rounded
is closer to normally distributed. A transform is a frozen value, like a format; `formats.Operand` holds one of each.
"""

import re

from .hadamard import Hadamard
from .rotation import Rotation
from .rounded import RoundedHadamard
from .transform import SIZES, Transform
from .wush import WUSH

__all__ = ["WUSH", "Hadamard", "Rotation", "RoundedHadamard", "Transform", "parse"]

_NAME = re.compile(
    r"(?P<kind>(?:te-)?hadamard|wush|rht)(?P<size>[1-9]\d*)(?:-s(?P<signs>[1-9a-f][0-9a-f]*))?(?P<inverse>-inverse)?"
)


def parse(prefix: str) -> tuple[Transform, bool] | None:
    """The transform called `prefix`, and whether it is a weight side's; None when it is no transform's name.

    Raises:
        ValueError: a random rotation of an unsupported size.
    """
    match = _NAME.fullmatch(prefix)
    if match is None or (not match["kind"].endswith("hadamard") and match["signs"]):
        return None
    kind, size, inverse = match["kind"], int(match["size"]), match["inverse"] is not None
    if kind == "rht":
        if size not in SIZES:
            raise ValueError(
                f"{prefix!r}: a random rotation has one of the sizes {', '.join(map(str, SIZES))}, got {size}"
            )
        return None if inverse else (Rotation(size), False)
    if size not in SIZES:
        return None
    if kind == "te-hadamard":
        return None if inverse or size != 16 else (RoundedHadamard(size, int(match["signs"] or "0", 16)), False)
    return (WUSH(size) if kind == "wush" else Hadamard(size, int(match["signs"] or "0", 16))), inverse
