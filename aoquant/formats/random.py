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

Under tensor parallelism a rank has a part of the matrix, and the element is its place in the whole one (`Place`), so
the ranks draw what one process would. Data-parallel ranks have tokens of their own: each draws under a seed of its own
(`of_rank`), or their rounding errors would be alike and not average out.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, and the test vectors of its library
Random123.
"""

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


class Span(NamedTuple):
    """Where the rows, or the columns, of a part lie in the whole matrix: row i is row
    `first + i // run * stride + i % run`.

    run: 0 means that they lie side by side, `first + i`. size: rows of the whole.
    """

    first: int
    size: int
    run: int = 0
    stride: int = 0

    def places(self, n: int, device: torch.device) -> Tensor:
        """(n,) int64: where rows 0 .. n - 1 lie."""
        i = torch.arange(n, device=device)
        return self.first + (i // self.run * self.stride + i % self.run if self.run else i)

    def in_blocks(self, block: int) -> "Span":
        """The same for blocks of `block` columns."""
        return Span(*(n // block for n in self))


class Place(NamedTuple):
    """Where a part (R, C) lies in the whole matrix."""

    rows: Span
    columns: Span

    def padded(self, multiple: int) -> "Place":
        """The place in a whole whose columns are padded to a multiple."""
        return self._replace(columns=self.columns._replace(size=-(-self.columns.size // multiple) * multiple))

    def elements(self, shape: torch.Size, device: torch.device) -> Tensor:
        """(R, C) int64: each element's place in the whole, row-major."""
        rows, columns = self.rows.places(shape[0], device), self.columns.places(shape[1], device)
        return rows.unsqueeze(1) * self.columns.size + columns


class Random(NamedTuple):
    """Where an encoding's random numbers come from.

    state: (3,) int64: seed (its lowest 32 bits count), module, step.
    side: 0 .. 5, one of the operands above, or the signs of a GEMM's rotation.
    place: of the matrix in the whole one; None for a whole one.
    """

    state: Tensor
    side: int
    place: Place | None = None

    def words(self, n: int) -> Tensor:
        """(n,) int64: 32 random bits for each of the elements 0 .. n - 1."""
        return self._fours(torch.arange(-(-n // 4), device=self.state.device)).flatten()[:n]

    def _fours(self, counter: Tensor) -> Tensor:
        """(*counter, 4) int64: the words of elements 4 * counter .. 4 * counter + 3."""
        seed, module, step = self.state.unbind()
        key = seed & _MASK, ((module << 3) | self.side) & _MASK
        halves = counter & _MASK, counter >> 32, step & _MASK, (step >> 32) & _MASK
        return torch.stack(philox(*halves, *key), -1)

    def uniform(self, like_RC: Tensor) -> Tensor:
        """float32 in [0, 1) of like's shape, multiples of 2^-24: exact, so every device compares the same numbers."""
        if self.place is None:
            words = self.words(like_RC.numel()).view(like_RC.shape)
        else:
            element = self.place.elements(like_RC.shape, self.state.device)
            words = self._fours(element // 4).gather(-1, (element % 4).unsqueeze(-1)).squeeze(-1)
        return (words >> 8).float() * 2.0**-24

    def in_blocks(self, block: int) -> "Random":
        """The numbers of a matrix that has one element for each block of `block` columns."""
        if self.place is None:
            return self
        return self._replace(place=Place(self.place.rows, self.place.columns.in_blocks(block)))

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


def of_rank(state: Tensor, rank: int) -> Tensor:
    """The state under which a data-parallel rank draws: rank 0 as one process does, the others with seeds of their own.

    The seed moves by an odd constant for each rank, so the seeds 0, 1, 2 of several runs meet no rank's.
    """
    return torch.cat((state[:1] + rank * _WEYL[0], state[1:])) if rank else state


def fresh_state(seed: int, name: str, device: torch.device | str = "cpu") -> Tensor:
    """(3,) int64: the state of the layer called `name` before its first backward."""
    return torch.tensor([seed, module_id(name), 0], dtype=torch.int64, device=device)
