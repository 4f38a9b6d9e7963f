"""One scale for the whole tensor, and constants in its place.

A scale of the whole tensor is one number, or two with a zero point, so it can be measured once and kept: as part of the
format and of its name, which every checkpoint holds. With a constant there, nothing is left that reaches beyond a
block.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .base import Format


@dataclass(frozen=True)
class OneScale(Format):
    """A format that has one scale for the tensor, all of it or in one of its variants. fixed: constants instead of that
    scale.
    """

    fixed: tuple[float, ...] = field(default=(), kw_only=True)

    @property
    def widest(self) -> str:
        """Return how far a scale reaches that is made from x: "block", "row" or "tensor"."""
        return "tensor"

    @property
    def constants(self) -> int:
        """Return how many numbers stand for it: a scale, and perhaps a zero point."""
        return 1

    @property
    def per_tensor(self) -> bool:
        return self.widest == "tensor" and not self.fixed

    @property
    def reach(self) -> str:
        return "block" if self.fixed else self.widest

    def fix(self, *numbers: float) -> Format:
        if not self.per_tensor:
            return super().fix(*numbers)
        return replace(self, fixed=check_fixed(self.name, numbers, self.constants))


def check_fixed(name: str, numbers: tuple[float, ...], wanted: int) -> tuple[float, ...]:
    """`numbers` as a positive finite scale and, where two are wanted, an int8 zero point.

    Raises:
        ValueError: they are something else.
    """
    scale, *zero = numbers or (0.0,)
    if len(numbers) != wanted or not 0 < scale < float("inf") or any(z != int(z) or not -128 <= z <= 127 for z in zero):
        what = "a positive finite scale" + (" and an int8 zero point" if wanted == 2 else "")
        raise ValueError(f"{name} is made static by {what}, got {', '.join(map(repr, numbers)) or 'nothing'}")
    return (scale, *map(int, zero))


def fixed_name(fixed: tuple[float, ...]) -> str:
    """The end of a format's name that holds its constants: repr gives every float32 back exactly."""
    return f"-static:{':'.join(map(repr, fixed))}" if fixed else ""


def constants(fixed: tuple[float, ...], device: torch.device) -> list[Tensor]:
    """(1, 1) tensors: the scale float32, the zero point int8."""
    dtypes = (torch.float32, torch.int8)
    return [torch.full((1, 1), c, dtype=dtype, device=device) for c, dtype in zip(fixed, dtypes, strict=False)]
