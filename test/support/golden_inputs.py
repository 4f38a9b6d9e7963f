"""Inputs that are the same bytes on every machine: integers from SplitMix64, then exact or IEEE-rounded steps in numpy.

`torch.randn` differs between devices and versions, so bytes recorded on a GPU could not be checked elsewhere. Here a
counter is hashed (Steele, Lea & Flood, "Fast splittable pseudorandom number generators", 2014), twelve 16-bit pieces
are summed (Irwin-Hall, close to normal), and the integer is scaled by a power of two. bfloat16 is rounded by hand.

Every generator returns (rows, k) in the dtype asked for; the name says what is adversarial in it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

BITS = {torch.float32: 32, torch.bfloat16: 16, torch.float16: 16}
MASK = (1 << 64) - 1
BIG = 448.0
OUTLIER = 1e-8
INT4_FILE = Path(__file__).resolve().parent.parent / "golden" / "int4" / "h200.safetensors"


def hashes(count: int, seed: int) -> np.ndarray:
    """`count` uint64 of SplitMix64."""
    z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(
        seed * 0xD1B54A32D192ED03 & MASK
    )
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def to_torch(x: np.ndarray, dtype: torch.dtype) -> Tensor:
    """float32 numpy -> torch, rounded half to even without asking torch to."""
    if dtype == torch.float32:
        return torch.from_numpy(x.copy())
    if dtype == torch.float16:
        return torch.from_numpy(x.clip(-65504, 65504).astype(np.float16))
    bits = x.view(np.uint32).astype(np.uint64)
    bits = (bits + np.uint64(0x7FFF) + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
    return torch.from_numpy(bits.astype(np.uint16).view(np.int16)).view(torch.bfloat16)


def _normal(rows: int, k: int, seed: int) -> np.ndarray:
    """About N(0, 1), every float32 mantissa bit in use."""
    pieces = hashes(rows * k * 3, seed).reshape(-1, 3)
    total = np.zeros(rows * k, dtype=np.int64)
    for shift in (0, 16, 32, 48):
        total += ((pieces >> np.uint64(shift)) & np.uint64(0xFFFF)).sum(1).astype(np.int64)
    fine = (hashes(rows * k, seed + 7919) & np.uint64(0xFFF)).astype(np.int64)
    # twelve uniforms have variance 1; the mean is taken off and 12 more bits put in below
    return (
        ((((total - 12 * 0x7FFF - 6) << 12) + fine).astype(np.float64) * 2.0**-28).astype(np.float32).reshape(rows, k)
    )


def normal(rows: int, k: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    """N(0, 1)."""
    return to_torch(_normal(rows, k, seed), dtype)


def weights(rows: int, k: int, dtype: torch.dtype, seed: int = 2) -> Tensor:
    """N(0, 1/64): the size of a linear layer's weights."""
    return to_torch(_normal(rows, k, seed) * np.float32(2.0**-6), dtype)


def heavy(rows: int, k: int, dtype: torch.dtype, seed: int = 3) -> Tensor:
    """Normal times 2^e with P(e) = 2^-e: outliers of up to thousands in most blocks."""
    h = hashes(rows * k, seed + 31) | np.uint64(1 << 12)
    lowest = (h & (~h + np.uint64(1))).astype(np.float64)  # the lowest set bit, at most 2^12
    return to_torch(
        (_normal(rows, k, seed) * lowest.astype(np.float32).reshape(rows, k) * np.float32(2.0**-6)).astype(np.float32),
        dtype,
    )


def special(rows: int, k: int, dtype: torch.dtype, seed: int = 4) -> Tensor:
    """One kind of trouble in each row, in this order, repeated; k is a multiple of 16."""
    x = _normal(rows, k, seed)
    column = np.arange(k)
    kinds: list[Callable[[np.ndarray], np.ndarray | float]] = [
        lambda r: r * 0,  # zeros of both signs
        lambda r: 0.75,  # constant, exact
        lambda r: -0.1,  # constant, inexact, negative
        lambda r: np.where(column % 16 == 5, r, 0.0),  # one-hot in every block of 16
        lambda r: np.where(column == 3, 1.5, 0.0),  # one-hot in the row: all other blocks are zero
        lambda r: -np.abs(r) - 0.01,  # all negative
        lambda r: np.where(column % 2, 6.0, -6.0),  # only extremes
        lambda r: np.where(column % 32 == 31, BIG, OUTLIER),
        lambda r: ((column * 5) % 29 - 14) * 0.25,  # ties: quarters with a power-of-two absmax in most blocks
        lambda r: np.abs(r) + 100,  # far from zero
        lambda r: r * 1e-30,  # below every floor
        lambda r: np.where(column % 64 < 32, r * 1e-3, r * 300),  # small blocks beside large ones
    ]
    for i in range(rows):
        x[i] = kinds[i % len(kinds)](x[i])
    return to_torch(x.astype(np.float32), dtype)


def bits(rows: int, k: int, dtype: torch.dtype, seed: int = 5) -> Tensor:
    """Random bit patterns, made finite by clearing an exponent bit: every exponent, subnormals included."""
    width = BITS[dtype]
    h = hashes(rows * k, seed)
    if width == 32:
        pattern = (h >> np.uint64(32)).astype(np.uint32).reshape(rows, k)
        x = torch.from_numpy(pattern.view(np.int32)).view(dtype)
        return torch.where(x.isfinite(), x, (x.view(torch.int32) & ~(1 << 30)).view(dtype))
    pattern16 = (h >> np.uint64(48)).astype(np.uint16).reshape(rows, k)
    x = torch.from_numpy(pattern16.view(np.int16)).view(dtype)
    return torch.where(x.isfinite(), x, (x.view(torch.int16) & ~(1 << 14)).view(dtype))


def bits_in_rows(rows: int, k: int, dtype: torch.dtype, seed: int = 6) -> Tensor:
    """Normal, each row with its own random exponent over the dtype's whole range: absmax takes every exponent."""
    low, high = (-14, 15) if dtype == torch.float16 else (-149, 125)
    exponent = (hashes(rows, seed + 13) % np.uint64(high - low)).astype(np.int32) + low
    return to_torch(np.ldexp(_normal(rows, k, seed), exponent[:, None]).clip(-3.3e38, 3.3e38).astype(np.float32), dtype)


def nonfinite(rows: int, k: int, dtype: torch.dtype, seed: int = 8) -> Tensor:
    """Normal, with NaN in row 1, +Inf in row 2 and -Inf in row 3 (one value in each), and clean rows elsewhere."""
    x = _normal(rows, k, seed)
    x[1 % rows, k // 3], x[2 % rows, k // 2], x[3 % rows, 1] = np.nan, np.inf, -np.inf
    t = to_torch(np.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0), dtype)
    return torch.where(torch.from_numpy(np.isfinite(x)), t, torch.from_numpy(x).to(dtype))


DATA: dict[str, Callable[..., Tensor]] = {
    f.__name__: f for f in (normal, weights, heavy, special, bits, bits_in_rows, nonfinite)
}


@cache
def data_set(name: str, rows: int, k: int, dtype: torch.dtype) -> Tensor:
    """One of `DATA`, made once."""
    return DATA[name](rows, k, dtype)


def golden_input(name: str, dtype: torch.dtype) -> Tensor:
    """What golden bytes were recorded on, normal rows before special ones: (32, 512) for int4, else (16, 256)."""
    rows, k = (20, 512) if name.startswith("int4-") else (4, 256)
    return torch.cat((weights(rows, k, dtype), special(12, k, dtype)))


# x_MK and w_NK of the recorded scaled matrix products
SCALED_MM = (lambda dtype: normal(16, 256, dtype, 31), lambda dtype: weights(32, 256, dtype, 32))


@cache
def recorded_int4() -> dict[str, dict[str, Tensor]]:
    """ "format/dtype" or "gemm/format" -> field -> tensor, of what `benchmarks/int4_layouts.py` recorded on a GPU."""
    cases: dict[str, dict[str, Tensor]] = {}
    with safe_open(INT4_FILE, "pt") as file:
        for key in file.keys():  # noqa: SIM118
            case, _, field = key.rpartition("/")
            cases.setdefault(case, {})[field] = file.get_tensor(key)
    return cases
