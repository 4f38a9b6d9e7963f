"""The slots of csrc/slots.cuh, into which rows of experts are cut, on a CPU: 32 threads play a warp. Needs g++."""

from __future__ import annotations

import ctypes

import pytest
import torch
from support.host_csrc import host_library

HEIGHT = 8


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    loaded = host_library(tmp_path_factory.mktemp("csrc"), "slots", "-std=c++20", "-pthread")
    loaded.find_slots.restype = ctypes.c_int64
    loaded.count_slots.restype = ctypes.c_int
    return loaded


def found(library: ctypes.CDLL, sizes: list[int], behind: int) -> list[list[int]]:
    ends = torch.tensor(sizes).cumsum(0).to(torch.int32)
    given = ctypes.c_void_p(ends.data_ptr()), len(sizes), sum(sizes) + behind
    slots = torch.full((library.find_slots(*given, None), 3), -2, dtype=torch.int32)
    library.find_slots(*given, ctypes.c_void_p(slots.data_ptr()))
    return slots.tolist()


def wanted(sizes: list[int]) -> list[list[int]]:
    slots, start = [], 0
    for expert, size in enumerate(sizes):
        slots += [[expert, start + at, min(HEIGHT, size - at)] for at in range(0, size, HEIGHT)]
        start += size
    return slots


def experts_and_most(experts: tuple[int, ...], most: tuple[int, ...]) -> pytest.MarkDecorator:
    """(experts, the most rows of one): a third of the pairs, and the others slow, for 32 threads meet at each step."""
    pairs = [(i, j) for i in range(len(experts)) for j in range(len(most))]
    return pytest.mark.parametrize(
        ("experts", "most"),
        [pytest.param(experts[i], most[j], marks=[] if i % 3 == j else [pytest.mark.slow]) for i, j in pairs],
    )


@experts_and_most((1, 3, 31, 300, 128, 129), (20, 8, 1))
def test_slots(library: ctypes.CDLL, experts: int, most: int) -> None:
    """Each expert's rows in order; what is left of as many slots as there could be has no expert."""
    g = torch.Generator().manual_seed(experts + most)
    sizes = (torch.randint(0, most + 1, (experts,), generator=g) * (torch.rand(experts, generator=g) < 0.5)).tolist()
    slots, want = found(library, sizes, 2), wanted(sizes)
    assert slots[: len(want)] == want
    assert all(slot[0] == -1 for slot in slots[len(want) :])
    ends = torch.tensor(sizes).cumsum(0).to(torch.int32)
    assert library.count_slots(ctypes.c_void_p(ends.data_ptr()), len(sizes), sum(sizes) + 2) == len(want)


def test_as_many_slots_as_rows_can_make(library: ctypes.CDLL) -> None:
    """Every expert has a row more than fills its slots: there are exactly as many as were said."""
    for sizes in ([1] * 5, [9] * 40, [1, 17, 1]):
        assert found(library, sizes, 0) == wanted(sizes)


def wide(library: ctypes.CDLL, sizes: list[int]) -> tuple[list[list[int]], list[list[int]]]:
    """Long and short slots; behind the last of each there is none."""
    ends, counts = torch.tensor(sizes).cumsum(0).to(torch.int32), torch.full((2,), -2, dtype=torch.int32)
    slots = torch.full((len(sizes) + sum(sizes) // 256 + 3, 3), -2, dtype=torch.int32)
    rest = len(sizes), sum(sizes) + 2, ctypes.c_void_p(counts.data_ptr()), ctypes.c_void_p(slots.data_ptr())
    library.find_wide_slots(ctypes.c_void_p(ends.data_ptr()), *rest)
    long, short = counts.tolist()
    found = slots[: long + 1 + short + 1].tolist()
    assert found[long][0] == found[-1][0] == -1
    return found[:long], found[long + 1 : -1]


def wanted_wide(size: int) -> list[list[int]]:
    """First row and rows of an expert's slots: 256 rows each, but of 257 to 320 that are left 160 and the others."""
    slots, first = [], 0
    while left := size - first:
        rows = 160 if 256 < left <= 320 else min(256, left)
        slots.append([first, rows])
        first += rows
    return slots


@experts_and_most((1, 31, 300, 129), (700, 300, 1))
def test_wide_slots(library: ctypes.CDLL, experts: int, most: int) -> None:
    """Each row of each expert is in one slot of up to 256 rows, and there are as many slots as even ones would be.
    Those of more than 128 rows come first, by expert.
    """
    g = torch.Generator().manual_seed(experts + most)
    sizes = (torch.randint(0, most + 1, (experts,), generator=g) * (torch.rand(experts, generator=g) < 0.7)).tolist()
    starts = [0, *torch.tensor(sizes).cumsum(0).tolist()]
    want = [[e, starts[e] + first, rows] for e, size in enumerate(sizes) for first, rows in wanted_wide(size)]
    long, short = wide(library, sizes)
    assert long == [slot for slot in want if slot[2] > 128]
    assert short == [slot for slot in want if slot[2] <= 128]
    covered = sorted(row for _, first, rows in long + short for row in range(first, first + rows))
    assert covered == list(range(sum(sizes)))
    assert len(want) == sum(-(-size // 256) for size in sizes)


@pytest.mark.slow
def test_wide_slots_of_every_size(library: ctypes.CDLL) -> None:
    """Experts of 0 to 299, and then of 300 to 599 rows: at each border between cuts."""
    for sizes in (list(range(300)), list(range(300, 600))):
        long, short = wide(library, sizes)
        rows: list[list[int]] = [[] for _ in sizes]
        for expert, _, count in sorted(long + short):
            rows[expert].append(count)
        assert rows == [[count for _, count in wanted_wide(size)] for size in sizes]


@pytest.mark.parametrize("slots", [0, 1, 7, 8, 9, 36])
@pytest.mark.parametrize("blocks", [1, 3, 23])
def test_every_tile_has_one_place(library: ctypes.CDLL, slots: int, blocks: int) -> None:
    """A slot and a block of rows of W each; eight slots, or what is left of them, meet a block one after another."""
    places = torch.full((slots * blocks, 2), -1, dtype=torch.int32)
    library.tile_places(slots, blocks, len(places), ctypes.c_void_p(places.data_ptr()))
    found = [tuple(place) for place in places.tolist()]
    assert sorted(found) == [(slot, block) for slot in range(slots) for block in range(blocks)]
    groups = [range(first, min(first + 8, slots)) for first in range(0, slots, 8)]
    assert found == [(slot, block) for group in groups for block in range(blocks) for slot in group]
