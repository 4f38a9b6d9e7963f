"""The block Hadamard transform: y_blk = x_blk diag(s) H h, H Sylvester's matrix of +-1, h = bf16(1 / sqrt(G)).

H spreads one outlier over its whole block, and a block of equal values becomes one large value: all-ones come out as
sqrt(G), 0, ...; so the scale of what is quantised is always found after the transform. Signs s go before the mixing.
After it they would be an exact no-op: they flip codes and change no magnitude.

The entries of T = h H diag(s) are bf16 numbers, as in kernels that multiply by T on tensor cores. 1/4 (G = 16) and 1/8
(64) are, and T T^T = I. 1 / sqrt(32) and 1 / sqrt(128) are not: h is .99988 of them, every application gains -1.1e-4,
and a weight transformed by T itself would make the product that of 1.1e-4 less, twice. So the weight side uses the
inverse of the rounded T: the same butterflies, times 1 / (G h).

Computed by butterflies, in float32 and one fixed order: pairs at distance 1, 2, 4, ..., sums and differences, and one
multiplication at the end. There is no matrix product whose order of additions a device could choose, so the CPU, CUDA
and the Triton kernels give the same bits. G log2 G additions instead of G^2 multiplications, too.

Source: QuaRot (Ashkboos et al., 2024) and QuIP# (Tseng et al., 2024) for Hadamard rotations in quantisation.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .transform import Transform

# bf16(1 / sqrt(G)), and 1 / (G h) rounded to float32 where it is used
_ENTRY = {16: 0.25, 32: 0.1767578125, 64: 0.125, 128: 0.08837890625}


@dataclass(frozen=True)
class Hadamard(Transform):
    """Hadamard transform of blocks of `size` values.

    signs: bit i set means that value i of each block changes its sign before the mixing; an integer, so that configs
        can be JSON.
    """

    signs: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.signs, bool) or not isinstance(self.signs, int) or not 0 <= self.signs < 1 << self.size:
            raise ValueError(
                f"Hadamard: signs is a mask of {self.size} bits, an integer from 0 to 2^{self.size} - 1, got {self.signs!r}"
            )

    @property
    def name(self) -> str:
        return f"hadamard{self.size}" + (f"-s{self.signs:x}" if self.signs else "")

    @property
    def sided(self) -> bool:
        return self.factor(False) != self.factor(True)

    def factor(self, inverse: bool) -> float:
        """Return the factor of the sums and differences."""
        h = _ENTRY[self.size]
        return 1 / (self.size * h) if inverse else h

    def apply(self, x_RK: Tensor, inverse: bool, matrix: Tensor | None = None) -> Tensor:
        return self._mixed(self._signed(x_RK.float()), inverse)

    def pull_back(self, grad_RK: Tensor, inverse: bool, matrix: Tensor | None = None) -> Tensor:
        return self._signed(self._mixed(grad_RK.float(), inverse))

    def _mixed(self, x_RK: Tensor, inverse: bool) -> Tensor:
        return butterflies(x_RK, self.size) * self.factor(
            inverse
        )  # a Python number is rounded to float32 first, on every device

    def _signed(self, x_RK: Tensor) -> Tensor:
        if not self.signs:
            return x_RK
        blocks = x_RK.reshape(x_RK.numel() // self.size, self.size)
        return (blocks * signs(self.signs, self.size, x_RK.device)).view(x_RK.shape)


def signs(mask: int, size: int, device: torch.device) -> Tensor:
    """Return (size,) int32 of +-1: -1 where `mask` has a bit. Integers: a float here would have the default dtype.

    Counted on the device: a tensor of Python numbers would be copied there, and the copy waits for the device.
    """
    bit = torch.arange(16, dtype=torch.int32, device=device)
    words = [mask >> start & 0xFFFF for start in range(0, max(size, 16), 16)]
    return (1 - 2 * torch.cat([(torch.full_like(bit, word) >> bit) & 1 for word in words]))[:size]


def butterflies(x_RK: Tensor, size: int) -> Tensor:
    """Blocks of `size` float32 values times Sylvester's matrix of +-1: pairs at distance 1, 2, 4, ..., sums and
    differences.
    """
    shape, n, distance = x_RK.shape, x_RK.numel(), 1
    while distance < size:
        a, b = x_RK.reshape(n // (2 * distance), 2, distance).unbind(1)
        x_RK = torch.stack((a + b, a - b), 1)
        distance *= 2
    return x_RK.view(shape)


def hadamard_matrix(n: int) -> Tensor:
    """Return a Hadamard matrix (n, n) over sqrt(n), float64 on the CPU: orthogonal, all entries as large.

    Sylvester's 2^k times a matrix of Paley's: of size q + 1 for a prime q = 3 mod 4, or 2 (q + 1) for q = 1 mod 4.

    Raises:
        ValueError: n is no such product. 640, 896, 2304, 2560, 3584 and 5120 are.
    """
    size = n // (n & -n) if n > 0 else 0  # the odd part
    while 0 < size <= n:
        if (core := _paley(size)) is not None:
            while len(core) < n:
                core = torch.cat([torch.cat([core, core], 1), torch.cat([core, -core], 1)])
            return core / n**0.5
        size *= 2
    raise ValueError(f"no Hadamard matrix of size {n} is known here: it is no power of two times a matrix of Paley's")


def _paley(n: int) -> Tensor | None:
    """Return a matrix of +-1 by Paley's constructions, or None. The one of size 1 is 1."""
    if n == 1:
        return torch.ones(1, 1, dtype=torch.float64, device="cpu")
    for q, twice in ((n - 1, False), (n // 2 - 1, True)):
        if q < 3 or n % 4 or q % 4 != (1 if twice else 3) or any(q % d == 0 for d in range(2, int(q**0.5) + 1)):
            continue
        squares = {i * i % q for i in range(1, q)}
        sign = torch.tensor(
            [0.0] + [1.0 if i in squares else -1.0 for i in range(1, q)], dtype=torch.float64, device="cpu"
        )
        at = torch.arange(q, device="cpu")
        s = torch.zeros(q + 1, q + 1, dtype=torch.float64, device="cpu")
        s[1:, 1:] = sign[(at[:, None] - at) % q]
        s[0, 1:], s[1:, 0] = 1.0, 1.0 if twice else -1.0
        eye = torch.eye(q + 1, dtype=torch.float64, device="cpu")
        if not twice:
            return eye + s
        mixed = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64, device="cpu")
        turned = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64, device="cpu")
        return torch.kron(s, mixed) + torch.kron(eye, turned)
    return None
