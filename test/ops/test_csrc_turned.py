"""The maps of csrc/turned_rows.cuh on a CPU: what lanes read of W's rows, and where their sums go. Needs g++.

The layouts of wgmma's operand and sums, and of movmatrix, are those of the PTX manual, written down here once more.
"""

from __future__ import annotations

import ctypes

import pytest
from support.host_csrc import host_library

LANES = range(32)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    loaded = host_library(tmp_path_factory.mktemp("csrc"), "turned", "-std=c++20")
    loaded.turned_swaps.restype = ctypes.c_bool
    return loaded


def test_a_warp_has_each_of_its_16_rows_once(library: ctypes.CDLL) -> None:
    assert sorted(library.turned_row(g, half) for g in range(8) for half in range(2)) == list(range(16))


def test_eight_lanes_read_from_eight_banks(library: ctypes.CDLL) -> None:
    """A piece is 16 bytes, 4 banks of 32: the eight rows of a half, at the same place j of K, lie in different ones."""
    for warp in range(8):
        for half in range(2):
            for j in range(4):
                rows = [16 * warp + library.turned_row(g, half) for g in range(8)]
                pieces = {(row * 64 + library.piece_of_64(row, j) * 16) % 128 // 16 for row in rows}
                assert len(pieces) == 8


def test_pieces_lie_where_the_copy_engine_puts_them(library: ctypes.CDLL) -> None:
    """CU_TENSOR_MAP_SWIZZLE_64B: bits 4 and 5 of an address are xored with bits 7 and 8."""
    for row in range(128):
        for j in range(4):
            address = row * 64 + j * 16
            assert row * 64 + library.piece_of_64(row, j) * 16 == address ^ (address >> 7 & 3) << 4


def test_sums_that_are_turned_lie_side_by_side(library: ctypes.CDLL) -> None:
    """Eight tokens: a lane holds sums (row of W, token), packs two tokens, movmatrix, swaps, and stores four rows."""
    packed = {}  # (half, lane) -> sums of two tokens: [(row, token), (row, token)]
    for half in range(2):
        for lane in LANES:
            g, t = lane // 4, lane % 4
            packed[half, lane] = [(library.turned_row(g, half), 2 * t + i) for i in range(2)]

    def movmatrix(half: int) -> list[list[tuple[int, int]]]:
        """Lane l has row l / 4 and columns 2 (l % 4), + 1 of the matrix; after it, of its transpose."""
        matrix = [[(-1, -1)] * 8 for _ in range(8)]
        for lane in LANES:
            for i in range(2):
                matrix[lane // 4][lane % 4 * 2 + i] = packed[half, lane][i]
        return [[matrix[lane % 4 * 2 + i][lane // 4] for i in range(2)] for lane in LANES]

    turned = [movmatrix(0), movmatrix(1)]
    for lane in LANES:
        token, t = lane // 4, lane % 4
        first, second = turned[0][lane], turned[1][lane]
        stored = second + first if library.turned_swaps(t) else first + second
        assert stored == [(4 * t + i, token) for i in range(4)]
