"""A rotation that is drawn anew in every backward: "rht32" flips signs at random and then mixes, x diag(s) H /
sqrt(size).

Outliers spread over their block, and no direction of the error is preferred. It is for the two operands of one GEMM: H
is orthogonal, both operands are rotated along the axis that the GEMM contracts, by the same signs, and in the product
the rotation cancels. So nothing ever pulls it back.

H is Sylvester's, by the butterflies of `Hadamard`, so every device makes the same bytes. Here the factor is 1 /
sqrt(size) in float32: there is no kernel to imitate whose entries are bf16, and a gain of 1.1e-4 would be a bias.
"""

from dataclasses import dataclass

from torch import Tensor

from .hadamard import butterflies
from .transform import Transform


@dataclass(frozen=True)
class Rotation(Transform):
    """A randomised Hadamard transform of every `size` values along K. Its matrix is the drawn signs, (size,) float32 of
    +1 and -1.
    """

    drawn = True

    @property
    def name(self) -> str:
        return f"rht{self.size}"

    def apply(self, x_RK: Tensor, inverse: bool, matrix: Tensor | None) -> Tensor:
        assert matrix is not None
        signed = (x_RK.float().reshape(-1, self.size) * matrix).view(x_RK.shape)
        return butterflies(signed, self.size) * self.size**-0.5

    def pull_back(self, grad_RK: Tensor, inverse: bool, matrix: Tensor | None) -> Tensor:
        raise NotImplementedError  # it cancels in the product of both operands
