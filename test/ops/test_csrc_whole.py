"""How csrc/whole_rows.cuh cuts its work (csrc/whole_plan.cuh), on a CPU: which bytes a block copies, where its lanes
read them, in which order it sums. Needs g++.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import pytest
import torch
from support.host_csrc import host_library

SHARED, MULTIPROCESSORS = 227 * 1024 - 256, 132


class Layout(NamedTuple):
    units: int
    width: int
    pitch: int
    parts: int
    x_at: int
    scales_at: int
    sums_at: int
    barriers_at: int
    bytes: int


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    loaded = host_library(tmp_path_factory.mktemp("csrc"), "whole", "-std=c++17")
    loaded.form.argtypes, loaded.slices.argtypes = [ctypes.c_int, ctypes.c_int64], [ctypes.c_int64]
    loaded.layout.restype = ctypes.c_bool
    return loaded


def units_of(plan: ctypes.CDLL, *ns: int) -> int:
    return int(plan.units((ctypes.c_int * len(ns))(*ns), len(ns)))


def layout_of(plan: ctypes.CDLL, k: int, units: int, width: int, scales: int, padded: bool) -> tuple[Layout, bool]:
    out = (ctypes.c_int * len(Layout._fields))()
    fits = plan.layout(k, units, width, scales, padded, out)
    return Layout(*out), fits


def test_the_kernels_of_today(plan: ctypes.CDLL) -> None:
    """The same number of warps cut K, whichever form multiplies: it is the order of additions."""
    shapes = (16, 2048, 2049, 4224, 4225, 6144, 6145, 8192, 65536)
    assert [plan.form(1, n) for n in shapes] == [plan.form(4, n) for n in shapes] == [1, 1, 2, 2, 1, 1, 3, 3, 3]
    assert [plan.form(16, n) for n in shapes] == [1, 1, 2, 2, 3, 3, 3, 3, 3]
    assert [plan.slices(n) for n in shapes] == [8, 8, 16, 16, 8, 8, 8, 8, 8]


@pytest.mark.parametrize("padded", [True, False], ids=["rows", "one-copy"])
@pytest.mark.parametrize(
    ("n", "k"), [(64, 128), (100, 256), (2048, 1920), (3000, 2048), (40, 4096), (2100, 2176), (300, 8192), (6200, 640)]
)
def test_a_block_multiplies_its_rows(plan: ctypes.CDLL, n: int, k: int, padded: bool) -> None:
    """Each byte of W once, where it belongs; each slice has the steps of its number, in order."""
    g = torch.Generator().manual_seed(n + k)
    codes = torch.randint(0, 256, (n, k // 2), generator=g, dtype=torch.uint8)
    read, units = torch.zeros_like(codes), units_of(plan, n)
    slices, steps, rows = plan.slices(n), k // 128, 16 * units
    assert -(-n // rows) <= MULTIPROCESSORS
    for first in range(0, n, rows):
        order = torch.full((units * steps, 3), -1, dtype=torch.int32)
        out = read[first:]
        here = -(-min(rows, n - first) // 16)
        count = plan.multiplied(
            ctypes.c_void_p(codes.data_ptr()), n, k, first, units, padded,
            ctypes.c_void_p(out.data_ptr()), ctypes.c_void_p(order.data_ptr()),
        )  # fmt: skip
        assert count == here * steps, count
        found: dict[tuple[int, int], list[int]] = {}
        for s, unit, step in order[:count].tolist():
            found.setdefault((s, unit), []).append(step)
        want = {(s, u): [*range(s, steps, slices)] for s in range(min(slices, steps)) for u in range(here)}
        assert found == want
    assert torch.equal(read, codes)


@pytest.mark.parametrize(
    ("ns", "k", "units"),
    [
        ((2048, 512, 512), 2048, 2),
        ((8192, 8192), 2048, 8),
        ((2048,), 2048, 1),
        ((2048,), 8192, 1),
        ((4096, 1024, 1024), 4096, 3),
        ((4096,), 4096, 2),
        ((2112,), 128, 1),
        ((2113,), 128, 2),
    ],
)
def test_a_launch_fits(plan: ctypes.CDLL, ns: tuple[int, ...], k: int, units: int) -> None:
    """A block a multiprocessor, and all that it asks for at once in its shared memory."""
    assert units_of(plan, *ns) == units
    for group, size, scales in ((128, 2, 2), (32, 2, 2), (16, 1, 1), (32, 1, 1)):
        if k % group == 0:
            width = k // group * size
            for padded in (True, False):
                at, fits = layout_of(plan, k, units, width, scales, padded)
                assert fits and at.bytes <= SHARED
                pitch = (width + 15) // 32 * 32 + 16
                assert at.x_at == units * at.parts * 16 * at.pitch and at.scales_at == at.x_at + 2 * k
                assert at.sums_at >= at.scales_at + units * 16 * pitch * scales
                assert at.barriers_at == at.sums_at + 16 * 16 * units * 4
                assert at.bytes == at.barriers_at + 8 * units * at.parts
                assert all(place % 16 == 0 for place in (at.x_at, at.scales_at, at.sums_at, at.pitch, pitch))


def test_what_does_not_fit(plan: ctypes.CDLL) -> None:
    for ns, k in (((8192, 8192, 8192), 2048), ((140000,), 128)):
        assert not layout_of(plan, k, units_of(plan, *ns), k // 16, 1, True)[1]


@pytest.mark.parametrize("k", [128, 640, 1024, 1920, 2048, 4096])
def test_rows_are_in_different_banks(plan: ctypes.CDLL, k: int) -> None:
    """Eight lanes that are served at once read 16 bytes each, 64 of one row and 64 of the next."""
    at, _ = layout_of(plan, k, 1, 16, 1, True)
    for g in range(0, 16, 2):
        banks = {
            (row * at.pitch + 16 * t + byte) // 4 % 32
            for row in (g, g + 1)
            for t in range(4)
            for byte in range(0, 16, 4)
        }
        assert len(banks) == 32
