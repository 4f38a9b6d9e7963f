"""A transform: a map of blocks of `size` values, its counterpart on the weight side, and the gradients of both.

Both sides are x_blk -> x_blk P^T with another P: T for activations, T^-T for weights, so that the product of the two is
untouched. Everything is float32 in and out, and never rounded to the layer's dtype in between: what is quantised is the
float32 result. (Kernels that round it to bf16 first make other codes, .8 to 1.1 % of them on normal values.)

The gradient of x_blk -> x_blk P^T is g_blk -> g_blk P. It also undoes the other side: (W T^-1) T = W.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

SIZES = (16, 32, 64, 128)


@dataclass(frozen=True)
class Transform(ABC):
    """Base of all transforms: a frozen, hashable, serialisable value.

    size: of the blocks, 16, 32, 64 or 128.
    """

    size: int = 16

    def __post_init__(self) -> None:
        if not isinstance(self.size, int) or self.size not in SIZES:
            raise ValueError(
                f"{type(self).__name__}: size must be one of {', '.join(map(str, SIZES))}, got {self.size!r}"
            )

    @property
    @abstractmethod
    def name(self) -> str:
        """The name that `parse` takes back."""

    @property
    def sided(self) -> bool:
        """Return whether it has other numbers for activations than for weights; the name of a weight's format tells
        then.
        """
        return False

    @property
    def fitted(self) -> bool:
        """Return whether `aoquant.calibrate` finds its matrices, (K / size, size, size), which every call is given."""
        return False

    @property
    def drawn(self) -> bool:
        """Return whether its signs are drawn for every use, as `Random.signs` gives them: for the operands of a
        backward GEMM alone.
        """
        return False

    @abstractmethod
    def apply(self, x_RK: Tensor, inverse: bool, matrix: Tensor | None) -> Tensor:
        """Blocks of x times P^T: float32 (R, K). inverse: the weight side. matrix: P where it is data, signs where
        drawn.
        """

    @abstractmethod
    def pull_back(self, grad_RK: Tensor, inverse: bool, matrix: Tensor | None) -> Tensor:
        """Blocks of a gradient times P: float32 (R, K), the gradient of `apply`'s input."""
