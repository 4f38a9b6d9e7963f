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


@pytest.mark.parametrize("experts", [1, 3, 31, 128, 129, 300])
@pytest.mark.parametrize("most", [1, 8, 20])
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
