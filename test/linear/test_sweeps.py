"""Every finite bf16 value through every format, and every stored byte back: against numpy and ml_dtypes, tolerance 0.

Each value is met three times: alone in its block, where it makes the scale; among its neighbours, where all values are
of one size; and among strangers, where a large one makes the scale of small ones.
"""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest
import torch
from support import numpy_oracle as oracle
from torch import Tensor

from aoquant.formats import MX, NVFP4, Affine, Encoded, Float8, Int4, Scales, get_format, layout, list_formats
from aoquant.formats.elements import ELEMENTS, FLOAT8, from_e2m1, from_float8

BF16 = torch.bfloat16
# everything that a bf16 block can hold without overflow of its range; Inf and NaN have tests of their own
VALUES = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(BF16)
VALUES = VALUES[VALUES.isfinite()]
NAMES = [n for n in list_formats() if type(get_format(n)) in (MX, NVFP4, Affine, Float8, Int4)]
NAMES = [n for n in NAMES if get_format(n).tile_rows == 1]


SMALL = {
    torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn,
    torch.float8_e5m2: ml_dtypes.float8_e5m2,
    torch.float8_e8m0fnu: ml_dtypes.float8_e8m0fnu,
}


def blocks(arrangement: str, size: int, limit: float) -> Tensor:
    """(B, size) of all bf16 values up to `limit`."""
    values = VALUES[VALUES.abs() <= limit]
    if arrangement == "alone":
        x = torch.zeros(len(values), size, dtype=BF16)
        x[:, 1] = values
        return x
    order = values.float().abs().argsort(stable=True)
    if arrangement == "strangers":
        order = torch.randperm(len(values), generator=torch.Generator().manual_seed(0))
    padded = torch.nn.functional.pad(values[order], (0, -len(values) % size))
    return padded.view(-1, size)


def plain(codes: Tensor, fmt: object, k: int) -> np.ndarray:
    """The numbers that codes stand for, float32."""
    if isinstance(fmt, Int4):
        return fmt.integers(Encoded(codes, None, None, None, k)).numpy()
    if isinstance(fmt, Affine):
        return fmt.integers(Encoded(codes, None, None, None, k)).float().numpy()
    if codes.dtype == torch.uint8:
        nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(1).numpy()
        return nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    return codes.view(torch.uint8).numpy().view(SMALL[codes.dtype]).astype(np.float32)


ARRANGEMENTS = ("neighbours", "alone", "strangers")
_LIKE_ANOTHER = re.compile("intx[35678]|floor|ceil|even|e5m2|g64|g256|bf16")  # its neighbours are always run


@pytest.mark.parametrize(
    ("name", "arrangement"),
    [
        pytest.param(n, a, id=f"{n}-{a}", marks=[pytest.mark.slow] if i and _LIKE_ANOTHER.search(n) else [])
        for n in NAMES
        for i, a in enumerate(ARRANGEMENTS)
    ],
)
def test_every_bf16_value_encodes_as_defined(name: str, arrangement: str) -> None:
    fmt = get_format(name)
    size = fmt.block or 64
    per_tensor = getattr(fmt, "per", "") == "tensor"
    # int4 and asymmetric integers take differences, which overflow above half of the range
    limit = 3e38 if not isinstance(fmt, Int4) and getattr(fmt, "mapping", "") != "asymmetric" else 1e38
    x = blocks(arrangement, size, limit)
    e = fmt.encode(x)
    b = x.float().numpy()
    rows = b.reshape(1, -1) if per_tensor else b
    zero = None
    with np.errstate(all="ignore"):
        if isinstance(fmt, MX):
            scale, codes = oracle.mx(b, fmt.element, fmt.rule)
        elif isinstance(fmt, NVFP4):
            amax = np.float32(np.abs(b).max())
            dynamic = np.maximum(oracle.constant(amax, 2688.0), np.float32(2.0**-121))
            each = np.maximum(oracle.constant(np.abs(b).max(1), 2688.0), np.float32(2.0**-121))
            pts = {"none": None, "static": np.float32(fmt.pts or 0), "dynamic": dynamic, "row": each}[fmt.outer]
            assert pts is None or (e.outer is not None and (e.outer.numpy().flatten() == pts).all())
            scale, codes = oracle.nvfp4(b, pts)
        elif isinstance(fmt, Float8):
            scale, codes = oracle.float8(rows, fmt.element)
        elif isinstance(fmt, Affine):
            scale, zero, codes = oracle.affine(rows, fmt.width, fmt.mapping, fmt.scales == "float32")
        else:
            scale, zero, codes = oracle.int4(b)
    assert e.scale is not None
    stored = e.scale.view(torch.uint8) if isinstance(fmt, MX) else e.scale.float()
    assert (stored.numpy().flatten() == scale).all()
    integers = isinstance(fmt, Int4 | Affine)  # whose zero has no sign
    assert oracle.equal(plain(e.codes, fmt, size), codes.reshape(b.shape) + (0.0 if integers else -0.0))
    if e.zero is not None:
        assert (e.zero.float().numpy().flatten() == zero).all()


@pytest.mark.nightly
@pytest.mark.parametrize("element", ELEMENTS)
def test_every_bf16_value_under_every_scale_byte(element: str) -> None:
    """x times 2^(127 - byte), then the element: as if calibrated, so that it saturates and vanishes too. 16.7 million
    pairs.
    """
    fmt = MX(element)
    x = torch.nn.functional.pad(VALUES, (0, -len(VALUES) % 32)).view(-1, 32)
    values = x.double().numpy()
    for byte in range(1, 255):
        scale = torch.full((len(x), 1), byte, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        got = plain(fmt.hold(x, Scales(scale)).codes, fmt, 32)
        with np.errstate(all="ignore"):
            want = oracle.element((values * 2.0 ** (127 - byte)).astype(np.float32), element)
        assert oracle.equal(got, want), byte


def every_code(bits: int) -> Tensor:
    return torch.arange(1 << bits).to(torch.uint8)


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("name", [n for n in NAMES if isinstance(get_format(n), MX | NVFP4)])
def test_every_scale_byte_with_every_code_decodes_exactly(name: str, dtype: torch.dtype) -> None:
    fmt = get_format(name)
    assert isinstance(fmt, MX | NVFP4)
    element = fmt.element if isinstance(fmt, MX) else "e2m1"
    codes = every_code(4 if element == "e2m1" else 8)
    row = codes.repeat(max(1, fmt.block // len(codes)))
    wide = row.expand(256, -1).contiguous()
    stored = layout.pack(wide, 4) if element == "e2m1" else wide.view(FLOAT8[element])
    scale_dtype = torch.float8_e8m0fnu if isinstance(fmt, MX) else torch.float8_e4m3fn
    scales = torch.arange(256).to(torch.uint8)
    scale = scales.unsqueeze(1).expand(-1, len(row) // fmt.block).contiguous().view(scale_dtype)
    e = Encoded(stored, scale, None, None, len(row))
    s = scales.numpy().view(SMALL[scale_dtype]).astype(np.float64)[:, None]
    with np.errstate(all="ignore"):
        want = (plain(stored, fmt, len(row)).astype(np.float64) * s).astype(np.float32)
        want = want.astype(ml_dtypes.bfloat16).astype(np.float32) if dtype == BF16 else want
    got = fmt.operand(e, dtype).float().numpy()
    nan = np.isnan(want)
    assert (np.isnan(got) == nan).all()
    assert oracle.equal(got[~nan], want[~nan])
    assert nan.mean() < 0.03


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("element", FLOAT8)
def test_every_float8_code_decodes(element: str, dtype: torch.dtype) -> None:
    codes = every_code(8).view(FLOAT8[element])
    want = codes.view(torch.uint8).numpy().view(SMALL[codes.dtype]).astype(np.float32)
    got = from_float8(codes, dtype)
    assert got.dtype == dtype
    nan = np.isnan(want)
    assert (np.isnan(got.float().numpy()) == nan).all()
    assert oracle.equal(got.float().numpy()[~nan], want[~nan])


@pytest.mark.parametrize("name", [n for n in NAMES if isinstance(get_format(n), Affine)])
def test_every_bf16_scale_with_every_code_decodes_exactly(name: str) -> None:
    """The product rounded once to the scale's dtype: all 32640 scales that there are, all codes."""
    fmt = get_format(name)
    assert isinstance(fmt, Affine)
    low, high = fmt.limits
    scales = VALUES[VALUES >= 0].unsqueeze(1)
    codes = torch.arange(low, high + 1, dtype=torch.int8).repeat(-(-32 // (high - low + 1)))
    wide = codes.expand(len(scales), -1).contiguous()
    stored = wide if fmt.width == 8 else layout.pack((wide - low).view(torch.uint8), fmt.width)
    zero = torch.full_like(scales, 3, dtype=torch.int8) if fmt.mapping == "asymmetric" else None
    per_row = scales.expand(-1, len(codes) // 32).contiguous() if fmt.per == "group" else scales
    e = Encoded(stored, per_row.float() if fmt.scales == "float32" else per_row, zero, None, len(codes))
    with np.errstate(all="ignore"):
        q = codes.numpy().astype(np.float32) - (0 if zero is None else 3)
        want = q * scales.float().numpy()
        want = (want if fmt.scales == "float32" else want.astype(ml_dtypes.bfloat16)).astype(ml_dtypes.bfloat16)
    assert oracle.equal(fmt.decode(e, BF16).float().numpy(), want.astype(np.float32))


def test_e2m1_table() -> None:
    assert from_e2m1(every_code(4)).tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
