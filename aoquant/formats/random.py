"""Random numbers that are functions of where they are used: a counter, not a generator.

A stochastic backward must draw fresh numbers in every call and still be reproducible: the same bytes on a CPU and on a
GPU, after a resume, under activation recompute, whatever the block size of a kernel. A generator with hidden state
gives none of these. Philox4x32-10 maps a counter and a key to 128 random bits by ten rounds of multiplication, so that
any element's number can be computed by itself:

    key      (seed, module << 3 | side)      which run, which layer, and which operand of which of its GEMMs
    counter  (element // 4, step)            64 bits each; element: a place in the row-major matrix that is encoded
    word     element % 4                     of the four 32-bit words that come out

`Random.state` holds (seed, module, step) on the device, where kernels read it: nothing waits for the CPU. A layer keeps
it in its state_dict and adds one to the step in every backward. Triton's `tl.philox` gives the same words.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, and the test vectors of its library
Random123.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
MODULE_BITS = 29  # of a key's word; the other three are the side

# sides: the operands that backward quantises; the two of a GEMM share one rotation, whose signs have sides of their own
DGRAD_GRAD_OUTPUT, DGRAD_WEIGHT, WGRAD_GRAD_OUTPUT, WGRAD_INPUT = range(4)
SIGNS = 4


class Random(NamedTuple):
    """Where an encoding's random numbers come from.

    state: (3,) int64: seed (its lowest 32 bits count), module, step.
    side: 0 .. 5, one of the operands above, or the signs of a GEMM's rotation.
    """

    state: Tensor
    side: int

    def words(self, n: int) -> Tensor:
        """(n,) int64: 32 random bits for each of the elements 0 .. n - 1."""
        counter = torch.arange(-(-n // 4), device=self.state.device)
        seed, module, step = self.state.unbind()
        key = seed & _MASK, ((module << 3) | self.side) & _MASK
        halves = counter & _MASK, counter >> 32, step & _MASK, (step >> 32) & _MASK
        return torch.stack(philox(*halves, *key), -1).flatten()[:n]

    def uniform(self, like: Tensor) -> Tensor:
        """float32 in [0, 1) of like's shape, multiples of 2^-24: exact, so every device compares the same numbers."""
        return ((self.words(like.numel()) >> 8).float() * 2.0**-24).view(like.shape)

    def signs(self, n: int) -> Tensor:
        """(n,) float32 of +1 and -1, the same for both operands of a GEMM."""
        return 1.0 - 2.0 * (Random(self.state, SIGNS + self.side // 2).words(n) & 1).float()


def philox(
    c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, k0: Tensor, k1: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four words of philox4x32-10; words are int64 tensors 0 .. 2^32 - 1, broadcast."""
    for _ in range(ROUNDS):
        # the low 64 bits of a product wrap alike whether its factors are read as signed or unsigned
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> 32 & _MASK) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32 & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def module_id(name: str) -> int:
    """A number of MODULE_BITS for a layer's name, the same in every process."""
    return zlib.crc32(name.encode()) & ((1 << MODULE_BITS) - 1)


def fresh_state(seed: int, name: str, device: torch.device | None = None) -> Tensor:
    """(3,) int64: the state of the layer called `name` before its first backward."""
    return torch.tensor([seed, module_id(name), 0], dtype=torch.int64, device=device)
