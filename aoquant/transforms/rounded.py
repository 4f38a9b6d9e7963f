"""The Hadamard transform of TransformerEngine's NVFP4 recipe: "te-hadamard16-sd7e8", fixed signs, rounded to the
tensor's dtype.

    y_blk = x_blk diag(s) H16 / 4, in float32, then rounded to x's dtype

`Hadamard` quantises the float32 result. TransformerEngine's kernels write a tensor of x's dtype before they find
scales, so that codes and absmax differ. It stands before both operands of wgrad, along the rows of the batch, and
cancels in the product.

The mask 0xD7E8 is TransformerEngine's default. Its kernels sum on tensor cores, here it is the butterflies of
`Hadamard`: the order of sums is not defined there, which float32 results show in their last bit.
Source: NVIDIA/TransformerEngine `hadamard_transform`, `NVFP4Quantizer`.
"""

from dataclasses import dataclass

from torch import Tensor

from .hadamard import Hadamard
from .transform import Transform

TE_SIGNS = 0xD7E8


@dataclass(frozen=True)
class RoundedHadamard(Transform):
    """H16 / 4 behind fixed signs, in x's dtype. signs: as of `Hadamard`."""

    signs: int = TE_SIGNS

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size != 16:
            raise ValueError(f"te-hadamard transforms 16 values, got size = {self.size}")
        _ = self.exact  # which checks the signs

    @property
    def exact(self) -> Hadamard:
        """The same, not rounded."""
        return Hadamard(self.size, self.signs)

    @property
    def name(self) -> str:
        return f"te-{self.exact.name}"

    def apply(self, x_RK: Tensor, inverse: bool, matrix: Tensor | None) -> Tensor:
        return self.exact.apply(x_RK, inverse).to(x_RK.dtype)

    def pull_back(self, grad_RK: Tensor, inverse: bool, matrix: Tensor | None) -> Tensor:
        return self.exact.pull_back(grad_RK, inverse)
